"""The script runs as `python SCRIPT` would run it: the same facts, read by the same script under both."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.launch.jobs import Place

FACTS = """
    import json, os, sys
    main = sys.modules["__main__"]
    spec = main.__spec__
    print(json.dumps({
        "argv": sys.argv,
        "orig_argv": sys.orig_argv[1:],
        "prefix": sys.prefix,
        "path0": sys.path[0],
        "file": __file__,
        "name": __name__,
        "package": __package__,
        "spec": spec and [spec.name, spec.origin],
        "loader": type(__loader__).__name__,
        "builtins": type(__builtins__).__name__,
        "doc": __doc__,
        "cached": globals().get("__cached__"),
        "names": sorted(set(vars(main)) - {"__annotations__"}),
        "is_main": main.__dict__ is globals(),
        "cwd": os.getcwd(),
    }))
"""


def _python(place: Place, *words: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, *words], cwd=place.path, env={**os.environ, **place.env}, check=True, capture_output=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    "words",
    [
        ["facts.py", "a", "--nproc", "7", "-x", "--", "-m"],
        ["./sub/../facts.py"],
        ["link/to.py", "b"],
        ["sub", "c"],
        ["archive.zip", "d"],
        ["-m", "facts", "e"],
        ["-m", "package.module", "f"],
        ["-m", "package", "g"],
        ["-m", "space.inner.module"],
    ],
    ids=" ".join,
)
def test_the_same_as_python(place: Place, words: list[str]) -> None:
    script = place.write("facts.py", FACTS)
    for name in ("sub/__main__.py", "package/__main__.py", "package/module.py", "space/inner/module.py"):
        place.write(name, FACTS)
    place.write("package/__init__.py", "")
    (place.path / "link").mkdir()
    (place.path / "link" / "to.py").symlink_to(script)
    with zipfile.ZipFile(place.path / "archive.zip", "w") as archive:
        archive.write(script, "__main__.py")
    assert json.loads(place.run(*words).ok().out) == _python(place, *words)


def test_modules_beside_the_script_are_found_from_anywhere(place: Place) -> None:
    place.write("code/helper.py", "VALUE = 5\n")
    place.write("code/train.py", "import helper; print(helper.VALUE)\n")
    place.write("helper.py", "raise ImportError('the wrong one')\n")
    assert place.run("code/train.py").ok().out == "5\n"


def test_a_module_named_like_one_of_the_standard_library_stays_out_of_the_servers_way(place: Place) -> None:
    place.write("json.py", "raise ImportError('not yours')\n")
    place.write("train.py", "print('fine')\n")
    assert place.run("train.py").ok().out == "fine\n"


def test_relative_imports_of_a_module(place: Place) -> None:
    place.write("pkg/__init__.py", "print('package')\n")
    place.write("pkg/part.py", "VALUE = 6\n")
    place.write("pkg/train.py", "from .part import VALUE\nprint(VALUE)\n")
    assert place.run("-m", "pkg.train").ok().out == "package\n6\n"


def test_the_environment_is_torchruns(torch_place: Place) -> None:
    torch_place.write(
        "train.py",
        """
        import json, os
        import torch.distributed as dist
        dist.init_process_group("gloo")
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, dict(os.environ))
        if dist.get_rank() == 0:
            print(json.dumps([everyone, dist.is_torchelastic_launched()]))
        dist.destroy_process_group()
        """,
    )
    ours, elastic = json.loads(torch_place.run("--nproc", 2, "train.py").ok().out)
    assert elastic is True
    theirs = subprocess.run(
        [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node=2", "train.py"],
        cwd=torch_place.path,
        env={**os.environ, **torch_place.env},
        check=True,
        capture_output=True,
    )
    reference = json.loads(theirs.stdout)[0]
    own = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "INSTEP_TEST_JOB"}
    # torchrun keeps a store of its own at the master's address; here rank 0 makes it, as with the static rendezvous.
    own |= {"TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_SIGNALS_TO_HANDLE"}
    more = {"INSTEP_RUN", "INSTEP_JOB", "INSTEP_GUARD", "INSTEP_TEST_JOB"}
    if metadata.version("torch").startswith("2.6."):  # whose torchrun does not set it yet
        more.add("TORCHELASTIC_SIGNALS_TO_HANDLE")
    for rank in (0, 1):
        assert set(reference[rank]) - set(ours[rank]) == set()
        assert set(ours[rank]) - set(reference[rank]) <= more
        assert {name: ours[rank][name] for name in set(reference[rank]) - own} == {
            name: value for name, value in reference[rank].items() if name not in own
        }
        assert ours[rank]["INSTEP_RUN"] == str(torch_place.runs[0])
        assert ours[rank]["INSTEP_JOB"] == ours[rank]["TORCHELASTIC_RUN_ID"] == torch_place.record()["job"]


def test_data_loader_workers_of_all_kinds(torch_place: Place) -> None:
    torch_place.write(
        "train.py",
        """
        import torch
        from torch.utils.data import DataLoader, Dataset

        class Squares(Dataset):
            def __len__(self):
                return 4
            def __getitem__(self, index):
                assert torch.utils.data.get_worker_info() is not None
                return index * index

        if __name__ == "__main__":
            for way in ("fork", "spawn", "forkserver"):
                loader = DataLoader(Squares(), batch_size=2, num_workers=1, multiprocessing_context=way)
                print(way, [batch.tolist() for batch in loader], flush=True)
        """,
    )
    result = torch_place.run("train.py", limit_s=90).ok()
    assert result.out == "".join(f"{way} [[0, 1], [4, 9]]\n" for way in ("fork", "spawn", "forkserver"))
    assert "left behind" not in result.err


def test_spawned_processes_find_the_scripts_functions(place: Place) -> None:
    place.write(
        "train.py",
        """
        import multiprocessing as mp
        from concurrent.futures import ProcessPoolExecutor
        def double(x):
            return 2 * x
        if __name__ == "__main__":
            with ProcessPoolExecutor(1, mp_context=mp.get_context("spawn")) as pool:
                print(list(pool.map(double, [1, 2])))
        """,
    )
    place.write("pkg/__init__.py", "")
    (place.path / "pkg" / "mod.py").write_text((place.path / "train.py").read_text())
    assert place.run("train.py").ok().out == "[2, 4]\n"
    assert place.run("-m", "pkg.mod").ok().out == "[2, 4]\n"


def test_the_end_is_pythons(place: Place) -> None:
    """Threads are waited for, atexit runs, files left open are flushed, objects are torn down."""
    place.write(
        "train.py",
        """
        import atexit, threading, time, os
        class Last:
            def __del__(self):
                os.write(1, b"torn down\\n")
        last = Last()
        file = open("left-open.txt", "w")
        file.write("all of it")
        atexit.register(print, "atexit")
        threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
        print("end of script", flush=True)
        """,
    )
    assert place.run("train.py").ok().out == "end of script\nthread\natexit\ntorn down\n"
    assert (place.path / "left-open.txt").read_text() == "all of it"


def test_a_hook_of_the_script_is_called(place: Place) -> None:
    place.write(
        "train.py",
        """
        import sys, traceback
        def hook(kind, error, trace):
            print(kind.__name__, len(traceback.extract_tb(trace)), error.__traceback__ is trace)
            raise SystemExit(42)
        sys.excepthook = hook
        raise ValueError("x")
        """,
    )
    result = place.run("train.py")
    assert (result.rc, result.out) == (42, "ValueError 1 True\n")


def test_randomness_differs_between_ranks(torch_place: Place) -> None:
    """As in processes of their own, and torch's default seed is what it always is."""
    torch_place.write(
        "train.py",
        "import random, numpy, torch\nprint(random.random(), numpy.random.rand(), torch.initial_seed())\n",
    )
    torch_place.run("--nproc", 2, "train.py").ok()
    first, second = torch_place.log(0).split(), torch_place.log(1).split()
    assert first[0] != second[0]
    assert first[1] != second[1]
    assert first[2] == second[2]


def test_standard_input_is_rank_0s(place: Place) -> None:
    place.write("train.py", "import sys\nprint(repr(sys.stdin.read()))\n")
    place.run("--nproc", 2, "train.py", stdin="hello\n").ok()
    assert (place.log(0), place.log(1)) == ("'hello\\n'\n", "''\n")


def test_ranks_hold_nothing_of_the_launchers(place: Place) -> None:
    place.write(
        "train.py",
        """
        import os
        held = {number: os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")}
        print(sorted(number for number, file in held.items() if "/instep-guard-" not in file))
        print(len(held), os.getsid(0) == os.getpid())
        """,
    )
    place.run("--nproc", 2, "train.py").ok()
    # 0, 1, 2, the socket for reports, and the listing itself; besides them four files of the rank's own records.
    assert place.log(1).count("'") == 10
    assert "9 True" in place.log(1)


def test_the_command_line_shows_the_script(place: Place) -> None:
    place.write("train.py", "print(open('/proc/self/cmdline').read().replace(chr(0), ' '))\n")
    assert place.run("train.py", "--lr", 3).ok().out.endswith("train.py --lr 3 \n")


def test_six_jobs_at_once_have_six_ports(place: Place) -> None:
    from concurrent.futures import ThreadPoolExecutor

    place.write("train.py", "import os, time\nprint(os.environ['MASTER_PORT'])\ntime.sleep(1)\n")
    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(lambda _: place.run("train.py").ok(), range(6)))
    ports = {int(result.out) for result in results}
    assert len(ports) == 6
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert not any(first <= port <= last for port in ports)
    assert len(place.runs) == 6  # and six folders, though all have the same default name
