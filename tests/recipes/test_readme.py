"""The README: its trainer is the recipe's, and what it links to is there."""

from __future__ import annotations

import re

from tests.recipes.programs import RECIPES

ROOT = RECIPES.parent
README = (ROOT / "README.md").read_text()


def test_the_trainer_is_that_of_the_recipe() -> None:
    (block,) = (
        one
        for one in re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
        if "instep.Trainer(" in one
    )
    recipe = (RECIPES / "digits_trainer.py").read_text()

    indented = "".join(f"    {line}\n" for line in block.splitlines())
    assert indented in recipe


def test_every_link_leads_somewhere() -> None:
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_recipe_is_in_the_table() -> None:
    named = set(re.findall(r"^\| \[(\w+\.py)\]", README, re.MULTILINE))

    assert named == {file.name for file in RECIPES.glob("*.py")}
