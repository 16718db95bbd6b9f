"""``instep run --via mpirun`` on this machine alone: what needs a real mpirun, and no second machine."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from instep.launch.tasks.link import Greeting, Link, connect, new_key
from instep.launch.tasks.task import who
from tests.launch.jobs import Place
from tests.needs import need_tool

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PROGRAMS = ("mpirun.openmpi", "mpiexec.mpich")


@pytest.fixture(params=PROGRAMS)
def program(request: pytest.FixtureRequest) -> str:
    """Both."""
    need_tool(request.param)
    return str(request.param)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """A folder for scripts that need no torch."""
    return Place(tmp_path, torch=False)


def options(program: str, ranks: int = 2) -> list[str]:
    return ["--via", "mpirun", "--mpirun", program, "--hosts", f"localhost:{ranks}"]


def test_a_rank_is_what_it_is_under_instep_run_alone(place: Place, program: str) -> None:
    """Arguments, name, path, variables, descriptors: nothing shows who has started it but MPI's own variables."""
    place.write(
        "train.py",
        """
        import json, os, sys
        mpi = ("OMPI_", "PMIX_", "PMI_", "PMI2_", "MPI", "HYD", "PRTE_", "OPAL_", "IPATH_", "GFORTRAN", "ORTE", "HFI_")
        own = ("INSTEP_TEST_JOB", "INSTEP_JOB", "INSTEP_RUN", "INSTEP_GUARD", "TORCHELASTIC_RUN_ID", "MASTER_PORT")
        own += ("TORCHELASTIC_ERROR_FILE", "LC_CTYPE", "PWD", "LD_LIBRARY_PATH")  # the last is Open MPI's
        kept = {n: v for n, v in os.environ.items() if not n.startswith(mpi) and n not in own}
        files = sorted(os.readlink(f"/proc/self/fd/{n}").split(":")[0] for n in (0, 1, 2))
        where = [os.path.abspath(path) for path in sys.path]
        found = [sys.argv, __name__, __file__, where, sys.orig_argv[1:], kept, files, os.getcwd(), os.getsid(0) == os.getpid()]
        if os.environ["RANK"] == "1":
            print(json.dumps(found))
        """,
    )
    place.run(*options(program), "--name", "a", "train.py", "--lr", "1").ok()
    place.run("--nproc", "2", "--name", "b", "train.py", "--lr", "1", stdin="").ok()
    one, other = (json.loads((place.path / "runs" / name / "log" / "rank-1.txt").read_text()) for name in "ab")
    assert one == other


def test_mpi_itself(place: Place, program: str) -> None:
    """A rank may call MPI, by whatever binding; and one that leaves without a word to it is named by its exit code."""
    is_open = "openmpi" in program
    library = "libmpi.so.40" if is_open else "libmpich.so.12"
    world = 'ctypes.byref(ctypes.c_char.in_dll(mpi, "ompi_mpi_comm_world"))' if is_open else "ctypes.c_int(0x44000000)"
    place.write(
        "train.py",
        f"""
        import ctypes, os, sys
        mpi = ctypes.CDLL("{library}", mode=ctypes.RTLD_GLOBAL)
        assert mpi.MPI_Init(None, None) == 0
        world, rank, size = {world}, ctypes.c_int(), ctypes.c_int()
        mpi.MPI_Comm_rank(world, ctypes.byref(rank))
        mpi.MPI_Comm_size(world, ctypes.byref(size))
        mpi.MPI_Barrier(world)
        print(os.environ["RANK"], "is", rank.value, "of", size.value)
        if rank.value == len(sys.argv) - 1:
            os._exit(5)
        mpi.MPI_Finalize()
        """,
    )
    result = place.run(*options(program, 3), "--name", "good", "train.py", "1", "2", "3").ok()
    assert result.out == "0 is 0 of 3\n"
    result = place.run(*options(program, 3), "--name", "bad", "train.py", "1")
    assert result.rc == 5, str(result)
    assert "✗ rank 1 on" in result.err
    assert "failed: it left with exit code 5" in result.err


def test_both_streams_come_whole(place: Place, program: str) -> None:
    """Long lines, lines without end, binary, both streams: the log has what the rank wrote, as it wrote it."""
    place.write(
        "train.py",
        r"""
        import os, sys
        rank = os.environ["RANK"]
        for size in (1, 4095, 4096, 70_000, 300_000):
            os.write(1, (rank * size + "\n").encode())
        os.write(2, b"\x00\xff\x1e[1,0]<stdout>:\r50%\rno end")
        """,
    )
    result = place.run(*options(program), "train.py").ok()
    for rank in range(2):
        lines = [str(rank).encode() * size + b"\n" for size in (1, 4095, 4096, 70_000, 300_000)]
        written = (place.runs[0] / "log" / f"rank-{rank}.txt").read_bytes()
        end = b"\x00\xff\x1e[1,0]<stdout>:\r50%\rno end"
        assert written.replace(end, b"") == b"".join(lines)
        assert end in written
    assert result.out == "".join("0" * size + "\n" for size in (1, 4095, 4096, 70_000, 300_000))


def test_as_many_worlds_of_one_are_refused(place: Place, program: str) -> None:
    """What happens where mpirun and the library that it was built with are two."""
    fake = place.write(
        "mpirun",
        f"""\
        #!/bin/sh
        [ "$1" = --version ] && exec {program} --version
        while [ "$2" != -m ]; do shift; done
        one="-n 1"
        [ $(id -u) = 0 ] && [ {program} = mpirun.openmpi ] && one="$one --allow-run-as-root"
        {program} $one "$@" & {program} $one "$@" & wait
        """,
    )
    fake.chmod(0o700)
    place.write("train.py", "open('ran', 'w')")
    result = place.run(*options(str(fake)), "train.py")
    assert result.rc == 2, str(result)
    assert "✗ mpirun has not started the ranks that it was asked for" in result.err
    assert "rank 0 of 1, not of 2" in result.err
    assert not (place.path / "ran").exists()
    assert not place.runs


def test_a_stopped_launcher_loses_nobody(place: Place) -> None:
    """Ctrl-Z for longer than a machine may be silent, with ranks that print all the while: they wait, as at a full pipe."""
    need_tool(PROGRAMS[0])
    place.write(
        "train.py",
        """
        import os, time
        from pathlib import Path
        Path("ready" + os.environ["RANK"]).touch()
        end = time.monotonic() + 7
        while time.monotonic() < end:
            print("x" * 100_000, flush=True)
            time.sleep(0.002)
        """,
    )
    with place.started(*options(PROGRAMS[0]), "train.py", limit_s=60) as run:
        run.wait_for("ready0", "ready1")
        run.signal(signal.SIGSTOP)
        time.sleep(6.5)
        run.signal(signal.SIGCONT)
        assert run.end() == 0, run.err


# ---- the connection between the two


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def serve(server: socket.socket, key: str, heard: list[Any]) -> threading.Thread:
    """The launcher's part, for one that calls."""

    def answer() -> None:
        greeting = Greeting(server.accept()[0], key)
        end = time.monotonic() + 5
        while time.monotonic() < end and not greeting.link.is_closed:
            if (said := greeting.hear()) is not None:
                heard.append(said)
                return
            time.sleep(0.01)
        heard.append(None)
        greeting.link.close()

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("is_right", [True, False])
def test_only_who_knows_the_key_is_heard(listening: socket.socket, is_right: bool) -> None:
    key = new_key()
    heard: list[Any] = []
    thread = serve(listening, key, heard)
    port = listening.getsockname()[1]
    link, whys = connect([("127.0.0.1", port)], key if is_right else new_key(), {"rank": 3}, 5.0)
    thread.join()
    if is_right:
        assert isinstance(link, Link)
        assert heard[0]["rank"] == 3
        link.close()
    else:
        assert (link, heard) == (None, [None])
        assert whys == {"127.0.0.1": "another one answers there"}


def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    link, whys = connect([("127.0.0.1", port)], new_key(), {}, 5.0)
    assert (link, whys) == (None, {"127.0.0.1": os.strerror(111)})


def test_a_stranger_that_says_nothing_does_not_keep_the_others(listening: socket.socket) -> None:
    """Two addresses: at one somebody else listens, and is silent; the other is the launcher's."""
    key = new_key()
    heard: list[Any] = []
    with socket.create_server(("127.0.0.2", listening.getsockname()[1])):
        thread = serve(listening, key, heard)
        begin = time.monotonic()
        where = [("127.0.0.2", listening.getsockname()[1]), ("127.0.0.1", listening.getsockname()[1])]
        link, _ = connect(where, key, {"rank": 0}, 10.0)
        thread.join()
        assert link is not None
        assert time.monotonic() - begin < 2
        link.close()


def test_who_a_task_is() -> None:
    found = who({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"})
    assert (found["rank"], found["world_size"], found["local_rank"], found["why"]) == (3, 4, 1, "")
    assert who({"OMPI_COMM_WORLD_RANK": "3"})["why"]
    assert "no variable of mpirun or srun" in who({})["why"]
