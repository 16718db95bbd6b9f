"""The reader of transcripts, which other tests rely on."""

from __future__ import annotations

from textwrap import dedent
from typing import TYPE_CHECKING

import pytest

from tests.transcripts import Typed, differs, read

if TYPE_CHECKING:
    from pathlib import Path

PAGE = """
    # A page
    ```console
    $ instep run \\
        train.py
    epoch 1
    …
    $ true
    ```
    ```sh
    not run
    ```
    ```console
    $ cat > a.py <<'END'
    $ not typed
    END
    $ echo $?
    0
    ```
"""


def test_commands_and_what_is_shown(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(dedent(PAGE).lstrip())
    assert read(page) == [
        Typed("instep run \\\n    train.py", ("epoch 1", "…"), 3),
        Typed("true", (), 7),
        Typed("cat > a.py <<'END'\n$ not typed\nEND", (), 13),
        Typed("echo $?", ("0",), 16),
    ]


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        (("a", "b"), "a\nb\n", True),
        (("a",), "a\nb\n", False),
        (("a", "…"), "a\nb\nc\n", True),
        (("…", "c"), "a\nb\nc\n", True),
        (("a … z",), "a b z\n", True),
        (("a … z",), "a b y\n", False),
        (("done · 5.1 s · runs/x-20261129-143512",), "done · 12 s · runs/x-20270101-000000\n", True),
        (("accuracy 98.60%",), "accuracy 98.61%\n", False),
        ((), "", True),
        ((), "surprise\n", False),
        (("(a*b)",), "(a*b)\n", True),
    ],
)
def test_what_is_the_same(shown: tuple[str, ...], printed: str, same: bool) -> None:
    assert (differs(shown, printed) == "") == same
