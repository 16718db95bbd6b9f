"""agree, mean, total, objects, barriers, main_first, main_only, logging: on several ranks and on one."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest

import instep
from instep.comm import interfaces
from instep.errors import StepError
from instep.world.meeting import is_loopback
from tests.harness import run_job, run_ranks


class TestAgree:
    @pytest.mark.parametrize(
        ("how", "values", "agreed"),
        [
            ("any", [False, True, False], True),
            ("any", [0, 0, 0], False),
            ("all", [True, True, False], False),
            ("all", [1, 1, 1], True),
            ("min", [3, 1, 2], 1),
            ("max", [3, 1.5, 2**80], 2**80),
            ("max", ["b", "c", "a"], "c"),
            ("main", ["a", "b", "c"], "a"),
            ("main", [{"lr": 0.1}, None, None], {"lr": 0.1}),
        ],
    )
    def test_all_ranks_get_the_same(self, how: Any, values: list[Any], agreed: Any) -> None:
        def work() -> Any:
            return instep.agree(values[instep.rank()], how=how)

        assert run_ranks(work, 3) == [agreed] * 3

    @pytest.mark.parametrize("how", ["min", "max"])
    def test_nan_wins(self, how: Any) -> None:
        def work() -> float:
            return instep.agree([1.0, math.nan][instep.rank()], how=how)

        assert all(math.isnan(value) for value in run_ranks(work, 2))

    def test_alone(self) -> None:
        assert instep.agree(True, how="any") is True
        assert instep.agree(False, how="all") is False
        assert instep.agree(3, how="max") == 3
        assert instep.agree("x") == "x"

    def test_a_tensor_is_a_truth_value(self) -> None:
        import torch

        assert instep.agree(~torch.isfinite(torch.tensor(math.nan)), how="any") is True  # type: ignore[comparison-overlap]

    def test_bad_how(self) -> None:
        with pytest.raises(StepError, match="'any', 'all'"):
            instep.agree(1, how="most")  # type: ignore[arg-type]


class TestMeans:
    def test_r11_weighted_mean(self) -> None:
        def work() -> float:
            loss, samples = [(1.0, 3), (6.0, 2)][instep.rank()]
            return instep.mean(loss, samples)

        assert run_ranks(work, 2) == [3.0, 3.0]

    def test_integers_stay_exact(self) -> None:
        def work() -> list[Any]:
            rank = instep.rank()
            return [instep.total(2**62 + rank), instep.total(10**30), instep.total(True), instep.mean(rank, 1)]

        assert run_ranks(work, 2) == [[2**63 + 1, 2 * 10**30, 2, 0.5]] * 2

    def test_the_order_of_ranks_does_not_matter(self) -> None:
        def work() -> list[float]:
            values = [1e16, 1.0, -1e16, 1.0]
            return [instep.total(values[instep.rank()]), instep.mean(values[instep.rank()], 1)]

        assert run_ranks(work, 4) == [[2.0, 0.5]] * 4

    def test_a_dict_at_once(self) -> None:
        def work() -> Any:
            rank = instep.rank()
            metrics = {"loss": 1.0 + 5 * rank, "right": rank}
            # The keys come in another order on the other rank.
            ordered = dict(sorted(metrics.items(), reverse=bool(rank)))
            return instep.mean(ordered, 3 - rank), instep.total(ordered)

        assert run_ranks(work, 2) == [({"loss": 3.0, "right": 0.4}, {"loss": 7.0, "right": 1})] * 2

    def test_a_rank_without_data(self) -> None:
        def work() -> list[float]:
            nothing = instep.rank() == 1
            one = instep.mean(math.nan if nothing else 2.0, 0 if nothing else 4)
            two = instep.mean(None if nothing else 2.0, 0 if nothing else 4)
            return [one, two, instep.mean({"a": math.nan if nothing else 2.0}, 0 if nothing else 4)["a"]]

        assert run_ranks(work, 2) == [[2.0, 2.0, 2.0]] * 2

    def test_nan_and_infinity_show(self) -> None:
        def work() -> list[float]:
            rank = instep.rank()
            return [instep.mean([math.nan, 1.0][rank], 1), instep.total([math.inf, 1.0][rank])]

        for mean, total in run_ranks(work, 2):
            assert math.isnan(mean)
            assert total == math.inf

    def test_tensors(self) -> None:
        def work() -> list[Any]:
            import torch

            rank = instep.rank()
            confusion = torch.tensor([[2**40, 1], [rank, 0]])
            mean = instep.mean(torch.tensor([1.0, 2.0]) * (rank + 1), 3 - rank)
            ints, scalar = instep.total(confusion), instep.total(torch.tensor(3))
            return [ints.tolist(), str(ints.dtype), mean.tolist(), str(mean.dtype), scalar]

        row = [[[2**41, 2], [1, 0]], "torch.int64", pytest.approx([1.4, 2.8]), "torch.float32", 6]
        assert run_ranks(work, 2) == [row, row]

    def test_tensors_of_other_shapes_or_dtypes(self) -> None:
        def work() -> None:
            import torch

            with pytest.raises(StepError, match="same shape and dtype"):
                instep.total(torch.zeros(2 + instep.rank()))
            with pytest.raises(StepError, match="same shape and dtype"):
                instep.total(torch.zeros(2, dtype=[torch.float32, torch.int64][instep.rank()]))

        run_ranks(work, 2)

    def test_other_keys(self) -> None:
        def work() -> str:
            with pytest.raises(StepError) as caught:
                instep.mean({"loss": 1.0, f"only {instep.rank()}": 1.0}, 1)
            return str(caught.value)

        texts = run_ranks(work, 2)
        assert all("only 0" in text and "only 1" in text for text in texts)

    @pytest.mark.parametrize("count", [-1, math.nan, math.inf, "3"])
    def test_bad_counts(self, count: Any) -> None:
        with pytest.raises(StepError, match="no number of samples"):
            instep.mean(1.0, count)

    def test_no_samples_at_all(self) -> None:
        with pytest.raises(StepError, match="no rank has a sample"):
            instep.mean(1.0, 0)

    def test_no_number(self) -> None:
        with pytest.raises(StepError, match="no number on rank 0"):
            instep.total("three")

    def test_alone(self) -> None:
        assert instep.mean(2.5, 4) == 2.5
        assert instep.total({"a": 1, "b": 2.5}) == {"a": 1, "b": 2.5}


class TestObjects:
    def test_gather_and_broadcast(self) -> None:
        def work() -> Any:
            rank = instep.rank()
            return instep.gather_objects({"rank": rank, "names": ["x"] * rank}), instep.broadcast_object(rank, source=2)

        everyone = [{"rank": rank, "names": ["x"] * rank} for rank in range(3)]
        assert run_ranks(work, 3) == [(everyone, 2)] * 3

    def test_alone(self) -> None:
        assert instep.gather_objects("x") == ["x"]
        assert instep.broadcast_object("x") == "x"

    def test_no_such_rank(self) -> None:
        with pytest.raises(StepError, match="no rank 1 in a world of 1"):
            instep.broadcast_object("x", source=1)


class TestBarrier:
    def test_all_come(self) -> None:
        def work() -> float:
            time.sleep(0.2 * instep.rank())
            start = time.monotonic()
            for _ in range(20):
                instep.barrier("here")
            return time.monotonic() - start

        waited = run_ranks(work, 3)
        assert waited[0] > 0.3
        assert waited[2] < 0.3

    def test_the_missing_are_named(self) -> None:
        def work() -> str:
            instep.barrier("start")
            if instep.rank() == 1:
                time.sleep(1.2)
                return ""
            with pytest.raises(StepError) as caught:
                instep.barrier("save", timeout=0.5)
            return str(caught.value)

        texts = run_ranks(work, 3)
        for text in (texts[0], texts[2]):
            assert "barrier('save') waited 0.5 s for rank 1, in vain" in text
            assert "last seen at start #1" in text

    def test_other_names_do_not_meet(self) -> None:
        def work() -> str:
            with pytest.raises(StepError) as caught:
                instep.barrier(["save", "load"][instep.rank()], timeout=0.5)
            time.sleep(0.5)
            return str(caught.value)

        texts = run_ranks(work, 2)
        assert "rank 1 on" in texts[0]
        assert "last seen at load #1" in texts[0]
        assert "last seen at save #1" in texts[1]

    def test_alone(self) -> None:
        instep.barrier("x", timeout=0.1)
        assert instep.world_size() == 1


class TestMainFirst:
    def test_order(self) -> None:
        def work() -> float:
            with instep.main_first():
                if instep.is_main():
                    time.sleep(0.3)
                return time.time()

        times = run_ranks(work, 3)
        assert times[0] <= min(times[1:])

    def test_of_each_node(self) -> None:
        def work() -> tuple[int, float]:
            with instep.main_first(scope="node"):
                if instep.rank() in (0, 2):
                    time.sleep(0.1 if instep.rank() == 0 else 0.8)
                return instep.rank(), time.time()

        times = dict(run_ranks(work, 4, nodes=[2, 2], env={"MASTER_ADDR": address_of_this_machine()}))
        assert times[0] <= times[1] < times[2] <= times[3]  # node 0 did not wait for node 1

    def test_an_exception_reaches_all(self) -> None:
        def work() -> str:
            try:
                with instep.main_first():
                    if instep.is_main():
                        raise FileNotFoundError("no data here")
            except FileNotFoundError:
                return "main"
            except StepError as error:
                return str(error)
            return "went on"

        main, other = run_ranks(work, 2)
        assert main == "main"
        assert "The main rank failed in main_first() at" in other
        assert "FileNotFoundError: no data here" in other

    def test_an_exception_of_another_rank_is_its_own(self) -> None:
        def work() -> None:
            with instep.main_first():
                if not instep.is_main():
                    raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            run_ranks(work, 2)

    def test_too_slow(self) -> None:
        def work() -> str:
            try:
                with instep.main_first(timeout=0.3):
                    if instep.is_main():
                        time.sleep(1)
            except StepError as error:
                return str(error)
            return ""

        assert "within 0.3 s" in run_ranks(work, 2)[1]

    def test_a_collective_in_it_is_an_error_at_once(self) -> None:
        def work() -> str:
            try:
                with instep.main_first():
                    instep.barrier("inside")
            except StepError as error:
                return str(error)
            return ""

        main, other = run_ranks(work, 2)
        assert "barrier('inside') needs all ranks, but is called inside main_first() at" in main
        assert "The main rank failed" in other

    def test_twice_and_alone(self) -> None:
        seen = []
        for _ in range(2):
            with instep.main_first(), instep.main_first():
                seen.append(instep.rank())
        assert seen == [0, 0]

    def test_bad_scope(self) -> None:
        with pytest.raises(StepError, match="'world' or 'node'"), instep.main_first(scope="rack"):  # type: ignore[arg-type]
            pass


def address_of_this_machine() -> str:
    """One that is no loopback address: pretended nodes cannot meet on that."""
    found = [one for addresses in interfaces.here().values() for one in addresses]
    return next(one for one in found if not is_loopback(one) and ":" not in one)


class TestMainOnly:
    def test_one_rank(self) -> None:
        def work() -> tuple[str | None, str]:
            @instep.main_only
            def save(name: str) -> str:
                return f"saved {name}"

            return save("x"), save.__name__

        assert run_ranks(work, 3) == [("saved x", "save"), (None, "save"), (None, "save")]

    def test_a_collective_in_it_is_an_error_at_once(self) -> None:
        def work() -> str:
            @instep.main_only
            def report() -> None:
                instep.total(1)

            try:
                report()
            except StepError as error:
                return str(error)
            return instep.gather_objects("fine")[0] if False else "fine"

        main, other = run_ranks(work, 2)
        assert "gather_objects needs all ranks, but is called inside @main_only" in main
        assert "report()" in main
        assert other == "fine"


class TestLogging:
    def test_who_speaks(self) -> None:
        def work() -> None:
            log = instep.get_logger("mine")
            log.debug("quiet")
            log.info("hello")
            log.warning("careful")

        assert run_job(work, 2).outputs == [
            "[rank 0] INFO hello\n[rank 0] WARNING careful\n",
            "[rank 1] WARNING careful\n",
        ]

    def test_alone(self, capsys: pytest.CaptureFixture[str]) -> None:
        instep.get_logger("alone").info("hello")
        assert capsys.readouterr().err == "INFO hello\n"


class TestOverTorchAlone:
    """A user who keeps init_process_group has all pieces, too."""

    def test_pieces(self) -> None:
        def work() -> list[Any]:
            rank = instep.rank()
            instep.barrier("b", timeout=10)
            with instep.main_first():
                pass
            return [
                instep.world_size(),
                instep.agree(rank == 1, how="any"),
                instep.mean(float(rank), 1),
                instep.total(rank),
                instep.gather_objects(rank),
            ]

        assert run_ranks(work, 2, join="torch") == [[2, True, 0.5, 1, [0, 1]]] * 2

    def test_nodes_are_not_known(self) -> None:
        def work() -> None:
            with pytest.raises(StepError, match="know the nodes"), instep.main_first(scope="node"):
                pass

        run_ranks(work, 2, join="torch", env={"LOCAL_RANK": None})


def test_a_rank_that_has_not_joined_is_told() -> None:
    def work() -> None:
        with pytest.raises(StepError, match="has not joined"):
            instep.agree(True, how="any")

    run_ranks(work, 2, join=None)
