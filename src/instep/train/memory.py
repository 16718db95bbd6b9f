"""Out of memory on one rank: all ranks take smaller pieces, the same ones, and do the step again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from instep.comm import gather_objects, get_logger
from instep.errors import TrainError
from instep.train import batches
from instep.train.seeds import random_states, restore_random_states
from instep.train.windows import Micro

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from instep.comm import Session
    from instep.train.step import Step
    from instep.train.windows import Window

_log = get_logger("instep.train")


class Split:
    """Runs a step in pieces of at most :attr:`most` samples; halves them, on all ranks alike, when memory runs out.

    A rank that runs out of memory in the middle of a step has left the others waiting in the reduction of the
    gradients. So here each rank computes its gradients alone, tells the others how it went, and only then are they
    reduced: the reduction does not overlap with the backward pass, which is the price.

    Args:
        session: the world.
        weight: the user's weight of a batch, None: its samples.

    Attributes:
        most: samples of one forward pass; None: whole micro-batches.

    """

    def __init__(self, session: Session, weight: Callable[[Any], Any] | None) -> None:
        self.session = session
        self.weight = weight
        self.most: int | None = None

    def run(self, step: Step, window: Window) -> None:
        """Gradients of the window, reduced over the ranks.

        Raises:
            TrainError: one sample at a time is still too much; the rank is named.

        """
        states = random_states()
        buffers = [one.clone() for one in step.model.buffers()]
        done = len(step.losses)
        while True:
            failed = self._attempt(step, window)
            sizes = gather_objects(failed)
            if not any(sizes):
                break
            self._shrink(sizes)
            step.model.zero_grad(set_to_none=True)
            del step.losses[done:]
            step.values.clear()
            restore_random_states(states)
            with torch.no_grad():
                for one, kept in zip(step.model.buffers(), buffers, strict=True):
                    one.copy_(kept)
        average_gradients(step.parameters, self.session)

    def _attempt(self, step: Step, window: Window) -> int:
        """Samples of the piece that did not fit; 0 if all went well."""
        size = 0
        try:
            for micro in window.micros:
                for piece in self._cut(micro):
                    size = batches.count(piece.batch)
                    step.backward(step.model, piece)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            return size
        finally:
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        return 0

    def _cut(self, micro: Micro) -> list[Micro]:
        if self.most is None or not micro.weight:
            return [micro]
        cut = batches.pieces(micro.batch, self.most)
        if len(cut) == 1:
            return [micro]
        weights = [float(self.weight(one)) if self.weight else float(batches.count(one)) for one in cut]
        scale = micro.share / micro.weight
        return [Micro(one, weight, weight * scale) for one, weight in zip(cut, weights, strict=True) if weight]

    def _shrink(self, sizes: list[int]) -> None:
        rank, size = max(enumerate(sizes), key=lambda pair: (pair[1] > 0, -pair[1]))
        if size == 1:
            host = f" on {self.session.hosts[rank]}" if self.session.hosts else ""
            raise TrainError(
                f"Rank {rank}{host} runs out of memory with a single sample.",
                cure="A smaller model or input, activation_checkpointing=..., precision='bf16', or strategy='fsdp'.",
            )
        self.most = size // 2
        if self.session.is_main:
            _log.warning(
                "rank %d ran out of memory with %d samples at once: all ranks now take at most %d (the global batch "
                "stays as it is)",
                rank,
                size,
                self.most,
            )


def out_of_memory(error: BaseException) -> bool:
    """Whether that is what happened; on the CPU torch has only a plain RuntimeError for it."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "not enough memory: you tried to allocate" in str(error)


def average_gradients(parameters: list[nn.Parameter], session: Session) -> None:
    """The mean of the ranks' gradients, in place; a rank without a gradient that another one has counts as 0."""
    if session.world_size == 1:
        return
    import torch.distributed as dist

    have = torch.tensor([one.grad is not None for one in parameters], dtype=torch.uint8)
    dist.all_reduce(have, dist.ReduceOp.MAX, group=session.group)
    kinds: dict[Any, list[Tensor]] = {}
    for one, needed in zip(parameters, have.tolist(), strict=True):
        if needed:
            if one.grad is None:
                one.grad = torch.zeros_like(one)
            kinds.setdefault((one.dtype, one.device), []).append(one.grad)
    for gradients in kinds.values():
        flat = torch.cat([one.reshape(-1) for one in gradients])
        dist.all_reduce(flat)
        flat /= session.world_size
        parts = flat.split([one.numel() for one in gradients])
        torch._foreach_copy_(gradients, [part.view_as(one) for part, one in zip(parts, gradients, strict=True)])
