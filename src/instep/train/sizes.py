"""How large is a step: plain arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from instep.errors import TrainError


@dataclass(frozen=True)
class Sizes:
    """The size of a step.

    Attributes:
        block: samples of one forward pass, all ranks together.
        accumulate: forward passes per step.
        note: what was changed to keep the global batch of a checkpoint, or why it could not be kept.

    """

    block: int
    accumulate: int
    note: str = ""

    @property
    def global_batch(self) -> int:
        """Samples per step."""
        return self.block * self.accumulate


def plan(per_rank: int | None, global_batch: int | None, accumulate: int, world_size: int) -> Sizes:
    """From the user's wish.

    Args:
        per_rank: samples per rank and forward pass, or None.
        global_batch: samples per step, or None.
        accumulate: forward passes per step.
        world_size: number of ranks.

    Raises:
        TrainError: neither or both are given, or the global batch cannot be cut into forward passes.

    """
    if (per_rank is None) == (global_batch is None):
        raise TrainError(
            "How large is a batch? Say it once." if per_rank is None else "The size of a batch is said twice.",
            evidence=[f"batch_size_per_rank={per_rank}, global_batch={global_batch}"],
            cure="Trainer(..., batch_size_per_rank=32), or global_batch=256: of all ranks and all passes",
        )
    if per_rank is not None:
        return Sizes(per_rank * world_size, accumulate)
    assert global_batch is not None
    block, rest = divmod(global_batch, accumulate)
    if rest or block < world_size:
        raise TrainError(
            "The global batch cannot be cut into that many forward passes"
            + (" of equal size." if rest else ": some ranks would have nothing to do."),
            evidence=[f"global_batch={global_batch}, accumulate={accumulate}, {world_size} ranks"],
            cure="A global batch that is a multiple of accumulate, and at least accumulate x ranks.",
        )
    return Sizes(block, accumulate)


def keep(saved: int, saved_ranks: int, now: Sizes, world_size: int, *, fixed_block: bool = False) -> Sizes:
    """The sizes with which a run goes on at another number of ranks: with the global batch of before, if it can be.

    Args:
        saved: the global batch of the checkpoint.
        saved_ranks: its number of ranks.
        now: what the arguments say for the ranks of now.
        world_size: the ranks of now.
        fixed_block: the data bring their own batch size, so only the accumulation can change.

    """
    if saved == now.global_batch or saved_ranks == world_size:
        return now
    before = f"the checkpoint has a global batch of {saved} on {saved_ranks} ranks"
    most = -(-now.block // world_size)  # samples per rank and pass that are known to fit into memory
    for accumulate in range(1, saved + 1):
        block, rest = divmod(saved, accumulate)
        fits = block == now.block if fixed_block else world_size <= block <= most * world_size
        if not rest and fits:
            note = f"{before}; kept: {block} samples per pass x {accumulate} passes on {world_size} ranks"
            return Sizes(block, accumulate, note)
    return Sizes(
        now.block,
        now.accumulate,
        f"{before}, which cannot be kept on {world_size} ranks with at most {most} samples per pass: it is "
        f"{now.global_batch} from here on, so the losses will differ from those of before",
    )
