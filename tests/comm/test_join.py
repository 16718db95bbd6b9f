"""Join and leave, in every way, and what is said when it cannot be done."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

import instep
from instep.comm import rollcall
from instep.errors import JoinError
from tests.harness import free_port, run_command, run_job, run_ranks
from tests.needs import need_namespaces
from tests.real.hosts import hosts

if TYPE_CHECKING:
    from pathlib import Path

    from instep.comm import Session


WITHOUT: dict[str, str | None] = dict.fromkeys(
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
)


def given(number: int, count: int, url: str, **options: Any) -> Session:
    return instep.init(url, rank=number, world_size=count, **options)


def my_number() -> int:
    """This rank's number, from the harness's environment, for tests that give it by hand."""
    return int(os.environ["RANK"])


class TestWays:
    def test_env(self) -> None:
        def work() -> tuple[int, int, str, str]:
            session = instep.init(timeout=20)
            return session.rank, instep.total(1), session.backend, session.world.init_method

        assert run_ranks(work, 3, join=None) == [(rank, 3, "gloo", "env://") for rank in range(3)]

    @pytest.mark.parametrize("kind", ["tcp", "file"])
    def test_given(self, kind: str, tmp_path: Path) -> None:
        url = f"tcp://127.0.0.1:{free_port()}" if kind == "tcp" else f"file://{tmp_path}/meet"

        def work() -> tuple[int, int, int, int, int | None]:
            number = my_number()
            for name in WITHOUT:
                os.environ.pop(name, None)
            with given(number, 2, url, timeout=20) as session:
                return session.rank, instep.total(1), session.local_rank, os.getpid(), session.world.num_nodes

        values = run_ranks(work, 2, join=None)
        assert [value[:3] for value in values] == [(0, 2, 0), (1, 2, 1)]
        assert [value[4] for value in values] == [1, 1]
        assert not list(tmp_path.iterdir())  # the file is gone

    def test_local_numbers_are_found_when_the_ranks_meet(self) -> None:
        def work() -> tuple[int | None, ...]:
            world = instep.init(timeout=20).world
            return world.local_rank, world.local_world_size, world.node_rank, world.num_nodes

        host = {"MASTER_ADDR": socket.gethostname(), "LOCAL_RANK": None, "LOCAL_WORLD_SIZE": None, "GROUP_RANK": None}
        assert run_ranks(work, 2, join=None, env=host) == [(0, 2, 0, 1), (1, 2, 0, 1)]

    def test_alone(self) -> None:
        def work() -> tuple[int, int, bool]:
            import torch.distributed as dist

            with instep.init() as session:
                return session.world_size, instep.total(3), dist.is_initialized()

        assert run_ranks(work, 1, join=None, env=WITHOUT) == [(1, 3, True)]

    def test_torch_is_initialised_and_left(self) -> None:
        def work() -> tuple[bool, int, bool]:
            import torch.distributed as dist

            with instep.init(timeout=20):
                inside = dist.is_initialized(), dist.get_world_size()
            return (*inside, dist.is_initialized())

        assert run_ranks(work, 2, join=None) == [(True, 2, False)] * 2

    def test_gloo_keeps_to_this_machine(self) -> None:
        def work() -> str:
            instep.init(timeout=20)
            return os.environ["GLOO_SOCKET_IFNAME"]

        assert run_ranks(work, 2, join=None, env={"GLOO_SOCKET_IFNAME": None}) == ["lo", "lo"]


class TestAgain:
    @pytest.mark.parametrize("kind", ["tcp", "file"])
    def test_50_joins_in_a_row(self, kind: str, tmp_path: Path) -> None:
        url = None if kind == "tcp" else f"file://{tmp_path}/meet"

        def work() -> int:
            return sum(joined_once() for _ in range(50))

        def joined_once() -> int:
            with instep.init(url, timeout=30) as session:
                return instep.total(1) * (session.rank + 1)

        assert run_ranks(work, 2, join=None, limit_s=120) == [100, 200]

    @pytest.mark.parametrize("late", [0, 1, 2])
    def test_any_order_of_leaving_is_silent(self, late: int) -> None:
        def work() -> None:
            with instep.init(timeout=30) as session:
                instep.total(1)
                time.sleep(0.5 * (session.rank == late))

        assert run_job(work, 3, join=None).outputs == [""] * 3

    def test_forgotten_close_is_silent_too(self, tmp_path: Path) -> None:
        script = tmp_path / "forget.py"
        script.write_text(
            "import time, instep\ns = instep.init(timeout=30)\ninstep.total(1)\ntime.sleep(s.rank * 0.3)\n"
        )
        assert run_processes([sys.executable, str(script)], 3) == [(0, "")] * 3

    def test_an_error_inside_waits_for_nobody(self, tmp_path: Path) -> None:
        script = tmp_path / "fail.py"
        script.write_text(
            "import time, instep\nwith instep.init(timeout=60) as s:\n"
            "    if s.rank == 1: raise ValueError('bad batch')\n    time.sleep(1)\n"
            "    instep.close(timeout=0.5)\n"
        )
        start = time.monotonic()
        (code0, err0), (code1, err1) = run_processes([sys.executable, str(script)], 2)
        assert time.monotonic() - start < 20
        assert (code0, code1) == (0, 1)
        assert "without ranks [1]" in err0
        assert err1.rstrip().endswith("ValueError: bad batch")


def run_processes(argv: list[str], count: int, limit_s: float = 60) -> list[tuple[int, str]]:
    """(exit code, standard error) of each rank, started by hand as the tutorials do."""
    base = {key: value for key, value in os.environ.items() if key not in WITHOUT}
    base |= {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    base |= {"OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(argv, env=base | {"RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
        for rank in range(count)
    ]
    try:
        return [(rank.wait(limit_s), rank.communicate()[1]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


class TestCannot:
    def test_a_missing_rank_is_named_on_all(self) -> None:
        def work() -> str:
            if my_number() == 1:
                return "never came"
            with pytest.raises(JoinError) as caught:
                instep.init(timeout=1.5)
            return str(caught.value)

        texts = run_ranks(work, 3, join=None)
        for text in (texts[0], texts[2]):
            assert "Rank 1 of 3 did not come within 1.5 s" in text
            assert f"came: ranks 0, 2 on {socket.gethostname()}" in text

    def test_a_missing_main_rank(self) -> None:
        def work() -> str:
            if my_number() == 0:
                return ""
            with pytest.raises(JoinError) as caught:
                instep.init(timeout=1)
            return str(caught.value)

        text = run_ranks(work, 2, join=None)[1]
        assert "Rank 1" in text
        assert "did not find the main rank at 127.0.0.1:" in text
        assert "ConnectionRefusedError" in text

    def test_an_unreachable_master(self) -> None:
        need_namespaces()
        code = "import instep; instep.init('tcp://10.88.0.99:29511', rank=1, world_size=2, timeout=1)"
        with hosts(["n1"]) as (n1,):  # a network on which nobody has that address
            done = n1.run([sys.executable, "-c", code])
        assert done.rc == 2
        assert "Rank 1 on n1 did not find the main rank at 10.88.0.99:29511 within" in done.err
        assert "Traceback" not in done.err

    def test_a_master_without_an_address(self) -> None:
        with pytest.raises(JoinError) as caught:
            given(1, 2, f"tcp://no-such-host.invalid:{free_port()}", timeout=1)
        assert "no-such-host.invalid does not resolve" in str(caught.value)

    def test_somebody_else_answers(self) -> None:
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            code = (
                "import instep, sys\n"
                f"instep.init('tcp://127.0.0.1:{other.getsockname()[1]}', rank=1, world_size=2, timeout=1)\n"
            )
            done = run_command([sys.executable, "-c", code], limit_s=60)
        assert done.rc == 2
        assert "not the main rank of a job" in done.err

    def test_a_port_in_use(self) -> None:
        with socket.socket() as held:
            held.bind(("0.0.0.0", 0))
            held.listen()
            port = held.getsockname()[1]
            with pytest.raises(JoinError) as caught:
                given(0, 2, f"tcp://127.0.0.1:{port}", timeout=5)
        assert f"Port {port}" in str(caught.value)
        assert f"pid {os.getpid()}" in str(caught.value)

    def test_two_of_the_same_rank(self) -> None:
        def work() -> str:
            with pytest.raises(JoinError) as caught:
                given(min(my_number(), 1), 3, f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}", timeout=10)
            return str(caught.value)

        start = time.monotonic()
        for text in run_ranks(work, 3, join=None):
            assert "Two processes say that they are rank 1" in text
            assert text.count("pid ") == 2
        assert time.monotonic() - start < 9

    def test_another_number_of_ranks(self) -> None:
        def work() -> str:
            number = my_number()
            with pytest.raises(JoinError) as caught:
                given(number, 2 + number, f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}", timeout=1.5)
            return str(caught.value)

        texts = run_ranks(work, 2, join=None)
        for text in texts:
            assert "do not agree how many they are" in text
            assert "rank 0 of 2" in text
            assert "rank 1 of 3" in text

    @pytest.mark.parametrize("timeout", [0, -1, "60", None, True, float("inf"), float("nan")])
    def test_bad_timeout(self, timeout: Any) -> None:
        with pytest.raises(JoinError, match="number of seconds"):
            instep.init(timeout=timeout)

    def test_joined_already(self) -> None:
        def work() -> None:
            with pytest.raises(JoinError, match="joined already"):
                instep.init()

        run_ranks(work, 2)

    def test_torch_joined_already(self) -> None:
        def work() -> None:
            with pytest.raises(JoinError, match="initialised already"):
                instep.init()

        run_ranks(work, 2, join="torch")

    def test_gloo_interface_in_the_syntax_of_nccl(self) -> None:
        def work() -> str:
            with pytest.raises(JoinError) as caught:
                instep.init(timeout=10)
            return str(caught.value)

        for text in run_ranks(work, 2, join=None, env={"GLOO_SOCKET_IFNAME": "^docker0"}):
            assert "GLOO_SOCKET_IFNAME=^docker0" in text
            assert "lo: 127.0.0.1" in text

    def test_no_gpu_here(self) -> None:
        import torch

        count = torch.cuda.device_count()
        with pytest.raises(JoinError, match="GPU"):
            instep.init(device=f"cuda:{count}")
        if count == 0:
            with pytest.raises(JoinError, match="NCCL carries"):
                instep.init(backend="nccl")

    @pytest.mark.parametrize("device", ["abacus", "cpu:x", 1.5])
    def test_an_unknown_device(self, device: Any) -> None:
        with pytest.raises(JoinError, match="no such device"):
            instep.init(device=device)

    def test_two_ranks_on_one_gpu(self) -> None:
        """What needs a GPU is only the name of one: the comparison runs over the ranks' real store."""

        def work() -> str:
            import torch.distributed as dist

            session = instep.comm.session.get_session()
            assert session is not None
            assert session.store is not None
            reports = rollcall.call(session.store, rollcall.report(session.world, ""), 10)
            rollcall.check_devices(session.store, reports, session.rank, f"GPU-{session.rank}", 10)
            other = dist.PrefixStore("other", session.store)
            with pytest.raises(JoinError) as caught:
                rollcall.check_devices(other, reports, session.rank, "GPU-7", 10)
            return str(caught.value)

        for text in run_ranks(work, 2):
            assert "same GPU" in text
            assert text.count("GPU-7") == 2

    def test_an_unknown_backend(self) -> None:
        with pytest.raises(Exception, match="carrier pigeon") as caught:
            instep.init(backend="carrier pigeon")
        assert isinstance(caught.value, JoinError)


class TestFile:
    def test_a_leftover_is_named_at_once(self, tmp_path: Path) -> None:
        path = tmp_path / "meet"
        code = f"import instep, os\ninstep.init('file://{path}', rank=0, world_size=1 + 1, timeout=0.5)"
        crashed = run_command([sys.executable, "-c", code], limit_s=60)
        assert crashed.rc == 2
        assert path.exists()
        start = time.monotonic()
        for rank in (0, 1):
            with pytest.raises(JoinError) as caught:
                given(rank, 2, f"file://{path}", timeout=30)
            assert "leftover" in str(caught.value)
            assert f"rm {path}" in str(caught.value)
        assert time.monotonic() - start < 5

    def test_a_leftover_of_torch_alone(self, tmp_path: Path) -> None:
        import torch.distributed as dist

        path = tmp_path / "meet"
        store = dist.FileStore(str(path), 2)
        store.set("key", "value")
        with pytest.raises(JoinError, match="leftover"):
            given(0, 2, f"file://{path}", timeout=30)

    def test_another_job_uses_it(self, tmp_path: Path) -> None:
        path = tmp_path / "meet"
        code = f"import instep\ninstep.init('file://{path}', rank=0, world_size=2, timeout=30)"
        with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL) as other:
            try:
                while not (path.exists() and b"who/0" in path.read_bytes()):
                    assert other.poll() is None
                    time.sleep(0.05)
                with pytest.raises(JoinError) as caught:
                    given(0, 2, f"file://{path}", timeout=30)
                assert "Another job is using" in str(caught.value)
                assert f"pid {other.pid}" in str(caught.value)
            finally:
                other.kill()

    @pytest.mark.parametrize("content", [b"dear diary, today\n", b"\x00", b"\xff" * 64])
    def test_no_rendezvous_file(self, content: bytes, tmp_path: Path) -> None:
        path = tmp_path / "diary"
        path.write_bytes(content)
        with pytest.raises(JoinError, match="no rendezvous file"):
            given(0, 2, f"file://{path}", timeout=30)
        assert path.read_bytes() == content

    def test_no_folder(self, tmp_path: Path) -> None:
        with pytest.raises(JoinError, match="folder does not exist"):
            given(0, 2, f"file://{tmp_path}/no/such/meet", timeout=30)

    def test_a_folder(self, tmp_path: Path) -> None:
        with pytest.raises(JoinError, match="is a folder"):
            given(0, 2, f"file://{tmp_path}", timeout=30)

    def test_not_writable(self) -> None:
        with pytest.raises(JoinError):
            given(0, 2, "file:///proc/meet", timeout=30)


class TestUnderTorchrun:
    def test_at_the_agents_store_and_elsewhere(self, tmp_path: Path) -> None:
        """At torchrun's own address its agent listens; at another one the main rank has to."""
        script = tmp_path / "meet.py"
        script.write_text(
            "import instep\n"
            f"for place in (None, 'tcp://127.0.0.1:{free_port()}'):\n"
            "    with instep.init(place, timeout=20) as session:\n"
            "        total = instep.total(session.rank + 1)\n"
            "        if session.is_main: print('total', total, session.world.launcher)\n"
        )
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        done = run_command([*torchrun, str(script)], limit_s=60)
        assert done.rc == 0, done.err
        assert done.out == "total 3 torchrun\n" * 2
        assert "Connection reset" not in done.err
