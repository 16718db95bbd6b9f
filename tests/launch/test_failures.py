"""R14: one rank fails; all are gone within seconds, the culprit is named once, and its exit code is the run's."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from tests.launch.jobs import Place

if TYPE_CHECKING:
    from pathlib import Path

# Every rank but 1 sleeps; what they do about SIGTERM is up to each test.
SCRIPT = """
    import os, signal, sys, time
    rank = int(os.environ["RANK"])
    if rank == 1:
        time.sleep(0.1)
        print("the last words of rank 1", flush=True)
        def fail():
            {fail}
        fail()
    {others}
    time.sleep(600)
"""
LIMIT_S = 5.0


@pytest.mark.parametrize(
    ("fail", "code", "said"),
    [
        ("raise ValueError('bad batch')", 1, r"rank 1 on \S+ failed: ValueError: bad batch"),
        ("os._exit(13)", 13, r"rank 1 on \S+ failed: it left with exit code 13"),
        ("sys.exit(3)", 3, r"rank 1 on \S+ failed: it left with exit code 3"),
        ("sys.exit('no data')", 1, r"rank 1 on \S+ failed: it left with exit code 1"),
        ("os.kill(os.getpid(), 9)", 137, r"rank 1 on \S+ failed: killed by signal 9 \(SIGKILL\), often the out-of-mem"),
        ("os.kill(os.getpid(), 11)", 139, r"rank 1 on \S+ failed: killed by signal 11 \(SIGSEGV\), in compiled code"),
        ("os.kill(os.getpid(), 15)", 143, r"rank 1 on \S+ failed: killed by signal 15 \(SIGTERM\)"),
        ("raise KeyboardInterrupt", 130, r"rank 1 on \S+ failed: KeyboardInterrupt"),
    ],
)
def test_one_rank_fails(place: Place, fail: str, code: int, said: str) -> None:
    place.write("train.py", SCRIPT.format(fail=fail, others=""))
    result = place.run("--nproc", 3, "train.py")
    assert result.rc == code, str(result)
    assert len(re.findall(said, result.err)) == 1, str(result)
    assert "log/rank-1.txt" in result.err
    assert result.seconds < LIMIT_S
    record = place.record()
    assert (record["outcome"], record["exit_code"]) == ("failed", code)
    assert record["exit_codes"] == {"0": 143, "1": code, "2": 143}
    assert record["first_failure"]["rank"] == 1
    if "raise" not in fail:
        assert "the last words of rank 1" in result.err


def test_the_traceback_is_the_users_and_comes_once(place: Place) -> None:
    script = place.write("train.py", SCRIPT.format(fail="raise ValueError('bad batch')", others=""))
    result = place.run("--nproc", 2, "train.py")
    assert result.err.count("Traceback (most recent call last)") == 1
    files = re.findall(r'File "([^"]+)"', result.err)
    assert files == [str(script), str(script)]
    assert place.record()["first_failure"]["type"] == "ValueError"
    assert "bad batch" in place.log(1)


def test_the_main_ranks_traceback_is_not_shown_twice(place: Place) -> None:
    place.write("train.py", "import os, time\nif os.environ['RANK'] == '0': raise ValueError('x')\ntime.sleep(600)\n")
    result = place.run("--nproc", 2, "train.py")
    assert result.rc == 1
    assert result.err.count("Traceback") == 1
    assert re.search(r"✗ rank 0 on \S+ failed: ValueError: x", result.err)


@pytest.mark.parametrize(
    "others",
    [
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)",
        "import atexit; atexit.register(time.sleep, 600); signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))",
        "import threading; threading.Thread(target=time.sleep, args=(600,)).start(); sys.exit(0)",
    ],
    ids=["ignores SIGTERM", "hangs in atexit", "a thread hangs"],
)
def test_the_others_cannot_stay(place: Place, others: str) -> None:
    place.write("train.py", SCRIPT.format(fail="raise ValueError('x')", others=others))
    result = place.run("--nproc", 3, "train.py")
    assert result.rc == 1, str(result)
    assert result.seconds < LIMIT_S + 0.5  # the half second is for the start


def test_a_failing_rank_that_never_ends(place: Place) -> None:
    place.write("train.py", SCRIPT.format(fail="import atexit; atexit.register(time.sleep, 600); int('x')", others=""))
    result = place.run("--nproc", 2, "train.py")
    assert result.rc == 1, str(result)
    assert result.err.count("failed: ValueError: invalid literal for int() with base 10: 'x'") == 1
    assert result.seconds < LIMIT_S + 0.5


def test_a_rank_may_end_early(place: Place) -> None:
    place.write("train.py", "import os, time\ntime.sleep(0.6 * (os.environ['RANK'] == '0'))\nprint('done')\n")
    result = place.run("--nproc", 2, "train.py").ok()
    assert result.out == "done\n"
    assert place.record()["exit_codes"] == {"0": 0, "1": 0}


@pytest.mark.parametrize(
    ("codes", "outcome", "code"),
    [((75, 75), "preempted", 75), ((75, 0), "preempted", 75), ((75, 3), "failed", 3), ((86, 0), "out of step", 86)],
)
def test_exit_codes_that_mean_something(place: Place, codes: tuple[int, int], outcome: str, code: int) -> None:
    place.write("train.py", f"import os, sys\nsys.exit({codes}[int(os.environ['RANK'])])\n")
    result = place.run("--nproc", 2, "train.py")
    assert result.rc == code, str(result)
    assert place.record()["outcome"] == outcome


def test_an_error_of_ours_is_its_text(place: Place) -> None:
    place.write(
        "train.py",
        """
        from instep import InstepError
        class Odd(InstepError):
            exit_code = 86
        raise Odd("the ranks disagree", evidence=["rank 0: 3"], cure="look")
        """,
    )
    result = place.run("train.py")
    assert result.rc == 86
    assert "Traceback" not in result.err
    assert "✗ the ranks disagree\n  rank 0: 3\n  → look\n" in result.err


def test_what_a_terminal_would_hide(place: Place) -> None:
    """An exception of a process that the script forked is not the rank's failure."""
    place.write(
        "train.py",
        """
        import os
        if not os.fork():
            raise ValueError("in the child")
        os.wait()
        print("fine")
        """,
    )
    assert place.run("train.py").ok().out == "fine\n"


def test_a_report_of_any_size(place: Place) -> None:
    place.write("train.py", "raise ValueError('x' * 1_000_000)\n")
    result = place.run("train.py")
    assert result.rc == 1
    assert place.record()["first_failure"]["type"] == "ValueError"


STEPS = """
    import os, signal
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    x = torch.ones(1000)
    for step in range(100000):
        if step == 3 and dist.get_rank() == 1:
            {fail}
        dist.all_reduce(x)
"""


def test_killed_in_the_middle_of_all_reduce_the_right_rank_is_named_20_of_20(tmp_path: Path) -> None:
    """Its peers say 'Connection closed by peer' before the kernel has told of its death."""

    def once(number: int) -> tuple[int, object, float]:
        (tmp_path / str(number)).mkdir()
        place = Place(tmp_path / str(number), torch=True)
        place.write("train.py", STEPS.format(fail="os.kill(os.getpid(), signal.SIGKILL)"))
        result = place.run("--nproc", 3, "train.py", limit_s=90)
        record = json.loads((place.runs[0] / "run.json").read_text())
        return result.rc, record["first_failure"]["rank"], result.seconds

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(once, range(20)))
    assert [entry[:2] for entry in found] == [(137, 1)] * 20


def test_raised_at_step_3(torch_place: Place) -> None:
    torch_place.write("train.py", STEPS.format(fail="raise ValueError('step 3')"))
    result = torch_place.run("--nproc", 2, "train.py")
    assert result.rc == 1
    assert re.search(r"✗ rank 1 on \S+ failed: ValueError: step 3\n  Traceback", result.err)


def test_an_error_of_ours_in_another_rank_after_torch_has_set_its_hook(torch_place: Place) -> None:
    torch_place.write(
        "train.py",
        """
        import torch.distributed as dist
        from instep import InstepError
        dist.init_process_group("gloo")
        if dist.get_rank() == 1:
            raise InstepError("the data is odd", evidence=["3 samples"], cure="look")
        dist.barrier()
        """,
    )
    result = torch_place.run("--nproc", 2, "train.py")
    assert result.rc == 2
    assert "Traceback" not in torch_place.log(1)
    assert re.search(r"✗ rank 1 on \S+ failed: InstepError: the data is odd\n    3 samples\n    → look\n", result.err)
