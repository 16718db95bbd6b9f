"""What else happens: callbacks, the events that they hear, and their order."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Literal, get_args

from instep.comm.order import alone
from instep.errors import TrainError
from instep.train.lonely import no_collectives

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from instep.train.state import Report
    from instep.train.trainer import Trainer

Ranks = Literal["all", "main"]

EVENTS = (
    "fit_start",
    "epoch_start",
    "gradients",
    "step_end",
    "report",
    "evaluate_start",
    "evaluate_end",
    "checkpoint",
    "epoch_end",
    "exception",
    "fit_end",
)


class Callback:
    """Something that happens beside training. Overwrite the events that you need; all others cost nothing.

    The rule: what changes training runs on all ranks, what writes runs on the main rank only. A callback of the main
    rank that calls a collective is an error at once, since the other ranks are not there.

    Attributes:
        ranks: ``"all"`` or ``"main"``.
        every: :meth:`on_step_end` and :meth:`on_gradients` run at every so-many-th step.

    """

    ranks: Ranks = "all"
    every: int = 1

    def on_fit_start(self, trainer: Trainer) -> None:
        """Training is about to begin, or to go on: all is built and a checkpoint has been read."""

    def on_epoch_start(self, trainer: Trainer) -> None:
        """An epoch begins, or goes on after a resume."""

    def on_gradients(self, trainer: Trainer) -> None:
        """The gradients of a step are complete, unscaled, and not clipped yet."""

    def on_step_end(self, trainer: Trainer) -> None:
        """One optimizer update is done: ``trainer.progress.step`` counts it."""

    def on_report(self, trainer: Trainer, report: Report) -> None:
        """Figures since the last report."""

    def on_evaluate_start(self, trainer: Trainer) -> None:
        """The evaluation data are about to be read."""

    def on_evaluate_end(self, trainer: Trainer, results: dict[str, float]) -> None:
        """The metrics over all evaluation data, the same on every rank."""

    def on_checkpoint(self, trainer: Trainer, path: Path) -> None:
        """A checkpoint stands at `path`, whole."""

    def on_epoch_end(self, trainer: Trainer) -> None:
        """All samples of an epoch are done; the epoch's evaluation comes after it."""

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        """Training ends with an error on this rank. The other ranks may be anywhere: no collectives here."""

    def on_fit_end(self, trainer: Trainer) -> None:
        """Training has ended well, also by a stop or a preemption."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of this callback: tensors and plain values, the same on every rank."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what :meth:`state_dict` gave."""


class _Function(Callback):
    """A plain function as a callback; made by :func:`on`."""

    def __init__(self, event: str, function: Callable[..., None], ranks: Ranks, every: int) -> None:
        self.ranks = ranks
        self.every = every
        self.name = getattr(function, "__qualname__", type(function).__name__)
        setattr(self, f"on_{event}", function)


def on(event: str, *, every: int = 1, ranks: Ranks = "all") -> Callable[[Callable[..., None]], Callback]:
    """Make a callback of a function.

    ::

        @instep.train.on("step_end", every=100, ranks="main")
        def say(trainer):
            print(trainer.progress.step)

        Trainer(..., callbacks=[say])

    Args:
        event: one of :data:`EVENTS`.
        every: only at each so-many-th step, for ``step_end`` and ``gradients``.
        ranks: ``"all"`` or ``"main"``.

    Raises:
        TrainError: there is no such event.

    """
    if event not in EVENTS:
        raise TrainError(f"There is no event {event!r}.", cure=f"One of {', '.join(EVENTS)}.")
    return lambda function: _Function(event, function, ranks, every)


class Events:
    """Who hears what: made once, so that an event that nobody hears costs one look at an empty list.

    Args:
        callbacks: in the order in which they are called.
        is_main: whether this rank is the main one.

    Raises:
        TrainError: something among them is no callback, or wants ranks or steps that do not exist.

    """

    def __init__(self, callbacks: Iterable[Callback], *, is_main: bool) -> None:
        self.callbacks = tuple(callbacks)
        for one in self.callbacks:
            _check(one)
        mine = [one for one in self.callbacks if is_main or one.ranks == "all"]
        self._heard = {
            event: [(one.every, _call(one, event)) for one in mine if _hears(one, event)] for event in EVENTS
        }
        self.gradients = self._heard["gradients"]
        self.step_end = self._heard["step_end"]

    def send(self, event: str, trainer: Trainer, *details: Any) -> None:
        """Tell all that hear `event`, in their order."""
        for _, call in self._heard[event]:
            call(trainer, *details)

    def state_dict(self) -> dict[str, Any]:
        """The states of the callbacks, by place and class: ``0.EMA``."""
        states = {f"{number}.{name_of(one)}": one.state_dict() for number, one in enumerate(self.callbacks)}
        return {name: state for name, state in states.items() if state}

    def load_state_dict(self, states: dict[str, Any]) -> list[str]:
        """Give each callback its state; the names of those that are not here any more, or have no state to take up."""
        for number, one in enumerate(self.callbacks):
            state = states.pop(f"{number}.{name_of(one)}", None)
            if state is not None:
                one.load_state_dict(state)
        return list(states)


def name_of(callback: Callback) -> str:
    """What the callback is called in messages."""
    return getattr(callback, "name", type(callback).__name__)


def _hears(callback: Callback, event: str) -> bool:
    name = f"on_{event}"
    return name in vars(callback) or getattr(type(callback), name) is not getattr(Callback, name)


def _call(callback: Callback, event: str) -> Callable[..., None]:
    function: Callable[..., None] = getattr(callback, f"on_{event}")
    if callback.ranks == "all":
        return function
    where = f"{name_of(callback)}.on_{event}(), a callback of the main rank (ranks='main')"

    @functools.wraps(function)
    def run(*args: Any) -> None:
        with alone(where), no_collectives(where):
            function(*args)

    return run


def _check(callback: Any) -> None:
    if not isinstance(callback, Callback):
        raise TrainError(
            f"This is no callback: {type(callback).__name__}.",
            evidence=[repr(callback)[:100]],
            cure="Make it a subclass of instep.train.Callback, or of a function: @instep.train.on('step_end')",
        )
    if callback.ranks not in get_args(Ranks):
        raise TrainError(
            f"{name_of(callback)} runs on ranks that do not exist.",
            evidence=[f"ranks={callback.ranks!r}"],
            cure="ranks = 'all' for what changes training, ranks = 'main' for what writes.",
        )
    if isinstance(callback.every, bool) or not isinstance(callback.every, int) or callback.every < 1:
        raise TrainError(f"{name_of(callback)}: every={callback.every!r} is no number of steps.", cure="every=100")
