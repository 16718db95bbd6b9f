"""FSDP and HSDP: every rank holds a part of the parameters, gradients and states, and fetches the rest when needed."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from instep.errors import TrainError
from instep.train.optimizers import build, fuse_all, refuse_states
from instep.train.precision import local
from instep.train.strategies.base import Strategy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

    from instep.comm import Session
    from instep.train.precision import Precision

ELEMENTS = 1_000_000  # parameters of a block that is worth messages of its own


class FSDP(Strategy):
    """``torch.distributed.fsdp.fully_shard`` over all ranks.

    The model is divided into blocks. A block's parameters are fetched in one message before its forward and its
    backward pass, and its gradients leave in one; what is in no block belongs to the whole model's own message.

    Args:
        blocks: the classes of the modules that become blocks, such as ``[TransformerLayer]``. None: the children of
            every ModuleList and Sequential, if they have a million parameters or more.
        reshard_after_forward: let a block's fetched parameters go after its forward pass and fetch them again for
            its backward pass: less memory, more messages.
        offload: keep parameters, gradients and states in the CPU's memory between their uses.

    """

    name = "fsdp"
    collective_forward = True
    shards_gradients = True

    def __init__(
        self,
        *,
        blocks: Sequence[type[nn.Module]] | None = None,
        reshard_after_forward: bool = True,
        offload: bool = False,
    ) -> None:
        self.block_classes = tuple(blocks) if blocks is not None else None
        self.reshard_after_forward = reshard_after_forward
        self.offload = offload
        self._group: Any = None  # the ranks that hold the parts of one copy; None: all

    def prepare(
        self,
        model: nn.Module,
        optimizer: Optimizer | Callable[[list[nn.Parameter]], Optimizer],
        session: Session,
        precision: Precision,
        *,
        fused: bool = True,
    ) -> tuple[nn.Module, Optimizer]:
        """Shard the model in place, and let the optimizer work on the parts."""
        self._check(session)
        _check_layout(model, self.name)
        mesh = self._mesh(session)
        if not isinstance(optimizer, torch.optim.Optimizer):
            self._shard(model, mesh, precision)
            return model, build(optimizer, model, fused=fused)
        made = build(optimizer, model, fused=False)
        refuse_states(made, self.name)
        if made.state:
            raise TrainError(
                f"{type(made).__name__} makes its states when it is made, whole, and {self.name} divides them.",
                cure="Give a function, which is called after that: optimizer=lambda parameters: "
                f"torch.optim.{type(made).__name__}(parameters)",
            )
        before = {one: name for name, one in model.named_parameters()}
        self._shard(model, mesh, precision)
        after = dict(model.named_parameters())
        for group in made.param_groups:
            group["params"] = [after[before[one]] for one in group["params"]]
        if fused:
            fuse_all(made, model)
        return model, made

    def _check(self, session: Session) -> None:
        if session.device.type == "cpu" and not hasattr(torch.cpu.Stream, "record_event"):
            raise TrainError(
                f"{self.name} needs a newer torch on the CPU: the fully_shard of this one works on GPUs only.",
                evidence=[f"torch {torch.__version__}", f"device: {session.device}"],
                cure="strategy='ddp' or 'zero1', or a newer torch.",
            )
        if self.offload and session.device.type == "cpu":
            raise TrainError(
                "offload=True keeps parameters in the CPU's memory, where they already are.",
                evidence=[f"device: {session.device}"],
                cure=f"strategy={self.name!r}, without offload",
            )

    def _mesh(self, session: Session) -> DeviceMesh:
        from torch.distributed.device_mesh import init_device_mesh

        return init_device_mesh(session.device.type, (session.world_size,), mesh_dim_names=("shard",))

    def _shard(self, model: nn.Module, mesh: DeviceMesh, precision: Precision) -> None:
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        # Parameters travel as what autocast computes in; gradients are summed as float32, the parameters' own type.
        policy = MixedPrecisionPolicy(param_dtype=precision.dtype, reduce_dtype=torch.float32)
        if precision.dtype is None:
            policy = MixedPrecisionPolicy()
        offload = CPUOffloadPolicy() if self.offload else OffloadPolicy()
        for block in [*self.blocks(model), model]:
            # The whole model's own parameters are needed again at once, at the begin of the backward pass.
            again = self.reshard_after_forward and block is not model
            fully_shard(block, mesh=mesh, reshard_after_forward=again, mp_policy=policy, offload_policy=offload)

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """The blocks, inner ones first.

        Raises:
            TrainError: the model has none of the classes that were named.

        """
        if self.block_classes is None:
            return _large_children(model)
        found = [one for one in model.modules() if isinstance(one, self.block_classes) and one is not model]
        if not found:
            have = sorted({type(one).__name__ for one in model.modules()})
            raise TrainError(
                f"The model has no {' or '.join(one.__name__ for one in self.block_classes)} to make blocks of.",
                evidence=[f"it has: {', '.join(have)}"],
                cure="FSDP(blocks=[...]) with classes of its modules, or none to let them be chosen.",
            )
        return found[::-1]

    @contextlib.contextmanager
    def no_sync(self, wrapped: Any) -> Iterator[None]:
        """Gradients stay here, whole: they take as much memory as the model."""
        wrapped.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            wrapped.set_requires_gradient_sync(True)

    def norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """The 2-norm of all gradients: of the parts here, then of all parts."""
        import torch.distributed as dist

        norm = torch.nn.utils.get_total_norm([local(one.grad) for one in parameters if one.grad is not None])
        square = norm.float().square()
        dist.all_reduce(square, group=self._group)
        return square.sqrt()

    def clip(self, parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
        """Scale this rank's parts of the gradients by what the norm of the whole asks for."""
        norm = self.norm(parameters)
        # As torch.nn.utils.clip_grads_with_norm_ does it, but without its way through DTensor for each operation.
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for one in parameters:
            if one.grad is not None:
                part = local(one.grad)
                part.mul_(factor.to(part.device))
        return norm

    def any_nonfinite(self, found: Tensor) -> Tensor:
        """1 on every rank if it is 1 on one."""
        import torch.distributed as dist

        dist.all_reduce(found, dist.ReduceOp.MAX)
        return found


class HSDP(FSDP):
    """FSDP within each group of ranks, as on one node, and copies of the model between the groups.

    The parts travel within a group only, where the network is fast; between groups only the summed gradients do.

    Args:
        shard_ranks: how many ranks share one copy of the model; None: those of a node.
        options: those of :class:`FSDP`.

    """

    name = "hsdp"

    def __init__(self, *, shard_ranks: int | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.shard_ranks = shard_ranks

    def _mesh(self, session: Session) -> DeviceMesh:
        from torch.distributed.device_mesh import init_device_mesh

        ranks = self.shard_ranks or _ranks_per_node(session)
        if ranks < 1 or session.world_size % ranks:
            raise TrainError(
                f"{session.world_size} ranks cannot be divided into groups of {ranks}, one for each copy of the model.",
                evidence=[f"shard_ranks={self.shard_ranks}"],
                cure=f"HSDP(shard_ranks=...) with a divisor of {session.world_size}",
            )
        shape = (session.world_size // ranks, ranks)
        mesh = init_device_mesh(session.device.type, shape, mesh_dim_names=("replicate", "shard"))
        self._group = mesh.get_group("shard")
        return mesh


def _ranks_per_node(session: Session) -> int:
    from instep.comm import gather_objects

    sizes = gather_objects((session.world.node_rank, session.world.local_world_size))
    if len({size for _, size in sizes}) > 1 or sizes[0][1] is None or sizes != sorted(sizes):
        raise TrainError(
            "hsdp shards within a node, and the nodes have different numbers of ranks, or ranks out of order.",
            evidence=[f"rank {rank}: node {node}, {size} ranks there" for rank, (node, size) in enumerate(sizes)][:16],
            cure="HSDP(shard_ranks=...), the same number of ranks on every node, or strategy='fsdp'",
        )
    return int(sizes[0][1])


def _large_children(model: nn.Module) -> list[nn.Module]:
    containers = [one for one in model.modules() if isinstance(one, (nn.ModuleList, nn.Sequential))]
    children = {child: None for one in containers for child in one.children()}
    large = [one for one in children if sum(value.numel() for value in one.parameters()) >= ELEMENTS]
    # A ModuleList has no forward pass that could fetch its parameters.
    order = {one: number for number, one in enumerate(model.modules())}
    callable_ones = [one for one in large if not isinstance(one, (nn.ModuleList, nn.ModuleDict))]
    return sorted(callable_ones, key=order.__getitem__, reverse=True)


def _check_layout(model: nn.Module, name: str) -> None:
    odd = [key for key, one in model.named_parameters() if not one.is_contiguous()]
    if odd:
        raise TrainError(
            f"{name} divides contiguous parameters only, and some of this model's are not (channels_last?).",
            evidence=[*odd[:5], *(["..."] if len(odd) > 5 else [])],
            cure="model.to(memory_format=torch.contiguous_format), or strategy='ddp'.",
        )
