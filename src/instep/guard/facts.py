"""Fingerprints of what should be equal on all ranks, cheap enough to be taken now and then.

Facts of the same name have to have the same value on every rank, but for those that :func:`may_differ` names: each
rank may have its own seed, and is asked at its own time. What changes in training is told for certain steps of the
optimizer ("learning rate at step 64"), so that ranks asked at different times can still be compared.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from instep.guard import texts

if TYPE_CHECKING:
    from types import FrameType

    from instep.guard.positions import Places

MAY_DIFFER = ("seed", "steps of ", "epoch of ", "size of ")  # beginnings of names
_EVERY_STEPS = 50  # learning rates are told for powers of two, and for multiples of this
_MOST_RATES = 40  # that are kept of each optimizer
_MOST_FILE_BYTES = 4_000_000
_MOST_MODULES = 2_000
_SETTINGS = ("NCCL_", "TORCH_NCCL_", "GLOO_", "TORCH_DISTRIBUTED_")
_OF_ONE_MACHINE = ("_SOCKET_IFNAME", "_FILE", "_IB_HCA", "_NETDEVICES", "_DIR", "_PATH", "_HOSTID", "_DEBUG")


def may_differ(name: str) -> bool:
    """Whether a fact may differ between ranks in step: it is evidence for a person, not for a verdict."""
    return name.startswith(MAY_DIFFER)


class _Rates:
    """How often an optimizer was stepped, and its learning rates after certain steps."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.name = str(type(optimizer).__name__)
        self.steps = 0
        self.rates: dict[int, str] = {}

    def step(self, optimizer: Any) -> None:
        steps = self.steps = self.steps + 1
        if steps & (steps - 1) == 0 or steps % _EVERY_STEPS == 0:
            found = [group.get("lr") for group in optimizer.param_groups]
            self.rates[steps] = ", ".join(map(texts.text_of, found[:8]))
            if len(self.rates) > _MOST_RATES:
                del self.rates[next(iter(self.rates))]


class Facts:
    """Takes the facts of this process."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._optimizers: dict[int, _Rates] = {}
        self._loaders: dict[str, str] = {}
        self._watching = False
        self._code: dict[str, str] = {}
        self._modules_seen: set[str] = set()

    def watch_optimizers(self) -> None:
        """Have torch tell of each optimizer's steps, once its optimizers are imported; 0.2 µs a step."""
        if self._watching:
            return
        module = sys.modules.get("torch.optim.optimizer")
        register = getattr(module, "register_optimizer_step_post_hook", None)
        if register is not None:
            # Added once and never removed: torch may be going through its hooks just now.
            self._watching = True
            register(self._stepped)

    def take(self, frame: FrameType | None) -> dict[str, str]:
        """All facts.

        Args:
            frame: the main thread's; the data loaders in its functions are told of, and are remembered.

        """
        with suppress(Exception):
            self._look_for_loaders(frame)
        facts = dict(self._loaders)
        for part in (self._of_code, self._of_versions, self._of_groups, self._of_settings, self._of_training):
            with suppress(Exception):  # a fact that cannot be had is not there
                facts |= part()
        return facts

    def _look_for_loaders(self, frame: FrameType | None) -> None:
        data = sys.modules.get("torch.utils.data")
        if data is None:
            return
        module = vars(sys.modules["__main__"])
        for values in (dict(module), *map(texts.objects, self._places.user_frames(frame))):
            for name, value in values.items():
                self._loaders |= _of_loader(name, value, data)

    def _stepped(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        rates = self._optimizers.get(id(optimizer))
        if rates is None or rates.optimizer() is not optimizer:
            rates = self._optimizers[id(optimizer)] = _Rates(optimizer)
            with suppress(Exception):
                self._look_for_loaders(sys._getframe(1))  # noqa: SLF001  # where training is under way
        rates.step(optimizer)

    def _of_code(self) -> dict[str, str]:
        """The contents of the user's files that are imported, each read once."""
        for name, module in list(sys.modules.items()):
            if name in self._modules_seen or name == "__mp_main__" or len(self._code) > _MOST_MODULES:
                continue
            self._modules_seen.add(name)
            file = vars(module).get("__file__") if type(module) is type(sys) else None
            if type(file) is str and self._places.of_file(file)[1]:
                self._code[f"code of {name}"] = _digest(self._places.of_file(file)[0])
        return self._code

    def _of_versions(self) -> dict[str, str]:
        torch = sys.modules.get("torch")
        version = getattr(torch, "__version__", None)
        facts = {"python": platform.python_version()}
        return facts | ({"torch": str(version)} if version else {})

    def _of_groups(self) -> dict[str, str]:
        c10d = sys.modules.get("torch.distributed.distributed_c10d")
        world = getattr(c10d, "_world", None)
        group = world and world.default_pg
        if group is None or world is None:
            return {}
        return {"world size": str(len(world.pg_group_ranks[group])), "backend": str(world.pg_backend_config[group])}

    def _of_settings(self) -> dict[str, str]:
        return {
            f"${name}": value[:200]
            for name, value in os.environ.items()
            if name.startswith(_SETTINGS) and not name.endswith(_OF_ONE_MACHINE)
        }

    def _of_training(self) -> dict[str, str]:
        facts: dict[str, str] = {}
        torch = sys.modules.get("torch")
        if torch is not None:
            facts["seed"] = str(torch.initial_seed())
        for number, rates in enumerate(list(self._optimizers.values()), start=1):
            name = f"{rates.name} #{number}"
            facts[f"steps of {name}"] = str(rates.steps)
            facts |= {f"learning rate of {name} after step {step}": rate for step, rate in list(rates.rates.items())}
        return facts


def _digest(path: str) -> str:
    with open(path, "rb") as file:  # noqa: PTH123  # path is text here
        data = file.read(_MOST_FILE_BYTES)
    return hashlib.sha256(data).hexdigest()[:16]


def _of_loader(name: str, value: Any, data: Any) -> dict[str, str]:
    """Of torch's own DataLoader and DistributedSampler; those derived from them by others are not asked."""
    kind = type(value)
    if kind is getattr(data, "DistributedSampler", None):
        return _of_sampler(name, value)
    if kind is not getattr(data, "DataLoader", None):
        return {}
    mine = vars(value)
    batch_size, sampler, dataset = mine.get("batch_size"), mine.get("sampler"), mine.get("dataset")
    facts = {f"batch size of {name}": str(batch_size), f"size of {name}.dataset": texts.size_of(dataset)}
    if type(sampler) is getattr(data, "DistributedSampler", None):
        facts |= _of_sampler(f"{name}.sampler", sampler)
        facts |= _of_shared_data(f"{name}.dataset", dataset, vars(sampler))
    if type(mine.get("batch_sampler")) is not data.BatchSampler and mine.get("batch_sampler") is not None:
        facts[f"size of {name}.batch_sampler"] = texts.size_of(mine["batch_sampler"])
    return {what: text for what, text in facts.items() if text}


def _of_shared_data(name: str, dataset: Any, sampler: dict[str, Any]) -> dict[str, str]:
    """Of what a sampler deals out to the ranks: it is the same on all of them."""
    replicas, share = sampler.get("num_replicas"), sampler.get("num_samples")
    if type(replicas) is not int or type(share) is not int or replicas < 1:
        return {}
    sizes = texts.sizes_of(dataset).values()  # a cache among them may well differ
    fitting = [size for size in sizes if share in {size // replicas, -(-size // replicas)}]
    return {f"samples in {name}": str(fitting[0])} if fitting else {}


def _of_sampler(name: str, sampler: Any) -> dict[str, str]:
    mine = vars(sampler)
    told = {f"{what} of {name}": mine.get(attribute) for what, attribute in _OF_SAMPLER.items()}
    return {what: repr(value) for what, value in told.items() if type(value) in {int, bool}}


_OF_SAMPLER = {
    "random seed": "seed",
    "replicas": "num_replicas",
    "epoch": "epoch",
    "samples": "num_samples",
    "shuffle": "shuffle",
    "drop_last": "drop_last",
}
