"""``instep.Trainer``: what to train, on what, and how; fit(), evaluate() and predict()."""

from __future__ import annotations

import math
import os
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from instep.comm import agree, get_logger
from instep.runs import current_folder
from instep.train import checks, seeds
from instep.train.batches import Call, to_device
from instep.train.building import evaluation_loader, meet, prepare
from instep.train.checkpoints import Checkpoints
from instep.train.evaluation import evaluate
from instep.train.loop import Loop
from instep.train.prediction import predict
from instep.train.preemption import Preempted, Preemption, seconds
from instep.train.saving import Saver
from instep.train.sharing import share_buffers
from instep.train.state import Progress
from instep.train.summary import print_summary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch import nn
    from torch.optim import Optimizer

    from instep.comm import Session
    from instep.data import ShardedLoader
    from instep.train.events import Callback, Events
    from instep.train.precision import Precision
    from instep.train.state import Report
    from instep.train.step import Step
    from instep.train.strategies import Strategy
    from instep.train.windows import Uneven, Windows

_log = get_logger("instep.train")


@dataclass(frozen=True)
class Fit:
    """How training ended.

    Attributes:
        step: optimizer updates in all.
        epoch: epochs in all.
        reason: ``"epochs"``, ``"steps"``, or why it was stopped.
        results: the last evaluation.
        best: (the best monitored value, the step it was reached at), None without monitor.
        report: the last report.

    """

    step: int
    epoch: int
    reason: str
    results: dict[str, float]
    best: tuple[float, int] | None
    report: Report | None


class Trainer:
    """The training loop, on any number of ranks: the same numbers on one and on many.

    ::

        with instep.init():
            trainer = instep.Trainer(
                resnet,                                           # a function: called under the seed, on every rank
                lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
                train_data,
                loss=torch.nn.functional.cross_entropy,
                eval_data=test_data,
                metrics={"accuracy": instep.train.Accuracy()},
                batch_size_per_rank=64,
                epochs=10,
                schedule="cosine",
            )
            trainer.fit()

    It knows when; how a step is made, evaluated or saved is the business of the pieces, each of which works alone.
    A subclass may overwrite :meth:`training_step` and :meth:`prediction_step`. Nothing is done in the constructor but
    to look at the arguments; the ranks meet in fit(), evaluate() and predict().

    Args:
        model: the bare module, or a function that makes it.
        optimizer: made over ``model.parameters()``, or a function of the parameters that are trained.
        train_data: a dataset (map-style or iterable), a DataLoader, or what ``instep.shard`` gave.
        loss: of (outputs, targets): the mean over the batch. None: the model's output is the loss, or has it as
            ``loss``. See :class:`instep.train.Call` for what the model gets of a batch.
        target: the field of dict or dataclass batches that holds the targets.
        training_step: ``(model, batch) -> loss``, in place of model and `loss`; or a dict with ``loss`` and further
            numbers to report.
        prediction_step: ``(model, batch) -> (outputs, targets)``, for evaluation and prediction.
        weight: how much a batch counts in the mean loss, such as its number of tokens; None: its samples.
        eval_data: what is evaluated after each epoch.
        metrics: by name: functions of all outputs and targets, :class:`instep.train.Metric`, or torchmetrics objects.
        monitor: the metric that says which checkpoint is best, and for schedules that follow one.
        larger_is_better: of the monitored value; None: unless its name says loss, error, or perplexity.
        evaluate_every: steps between evaluations; None: after each epoch.
        batch_size_per_rank: samples that a rank takes in one forward pass.
        global_batch: samples of a step over all ranks and the accumulation, in place of it: it need not be divisible.
        accumulate: forward passes per step.
        shuffle: the training data in a new order each epoch; None: where they have a length.
        drop_last: leave out a last global batch that is not full.
        loader_options: what DataLoader takes: num_workers, collate_fn, pin_memory, ...
        eval_loader_options: the same for the evaluation data; None: `loader_options`.
        eval_batch_size: samples per rank of one forward pass in evaluation; None: as in training.
        uneven: ranks with data of their own and unequally much of it: ``"join"``: all of it is used; ``"stop"``: all
            end with the first.
        epochs: when to end.
        steps: when to end, in optimizer steps; with both, at what comes first.
        max_time: save and end with exit code 75 after so long: ``"23:50:00"``, or seconds.
        schedule: ``"constant"``, ``"linear"``, ``"cosine"``, or a function ``(optimizer)`` or ``(optimizer, steps)``
            that makes any scheduler of torch. It moves once per optimizer step.
        warmup: steps over which the learning rate rises first.
        scale_lr: ``"linear"`` or ``"sqrt"``: scale the learning rate by global batch / `base_batch`.
        base_batch: the global batch that the learning rate was chosen for.
        precision: ``"fp32"``, ``"bf16"`` or ``"fp16"``.
        strategy: ``"ddp"``, ``"zero1"``, ``"fsdp"``, ``"hsdp"``, or one with options: ``instep.train.DDP(...)``.
        sync_batchnorm: BatchNorm over the batches of all ranks (CUDA only).
        activation_checkpointing: classes of modules whose activations are computed again in the backward pass.
        compile: torch.compile the model; or a dict of its options.
        fused: let torch's optimizers use their fused kernels where you did not choose.
        clip_norm: the largest norm of all gradients of a step together.
        non_finite: a loss or gradient that is not finite: ``"stop"`` or ``"skip"`` the step, on all ranks.
        on_oom: out of memory on a rank: ``"raise"``, or ``"split"``: all ranks take smaller micro-batches.
        callbacks: what else happens.
        progress: False: no progress bar.
        summary: False: no summary at the start.
        log_every: steps between reports.
        checkpoint: where to save: a folder, or :class:`instep.train.Checkpoints`.
        resume: ``"auto"``: from the newest whole checkpoint if there is one; ``"latest"``, ``"best"``, a step, or a
            path: from that one. evaluate() and predict() without fit() take its weights, too.
        seed: of the weights, the order of the data, and the augmentation.
        deterministic: bit-equal runs, or an error where torch has no algorithm for it.

    Attributes:
        session: the world; from here on there once the ranks have met.
        model: the bare module, on this rank's device.
        events: all callbacks.
        wrapped: what training calls: the engine of the strategy around the model.
        optimizer: the one that steps.
        schedule: the scheduler of torch, or None.
        strategy: how the ranks share the work.
        steps: optimizer steps at which training ends, where known.
        steps_per_epoch: where known.
        global_batch: samples per step, all ranks and the accumulation together.
        progress: where training stands.
        report: the last report.
        results: the last evaluation.
        best: the best monitored value and its step.

    Raises:
        TrainError: arguments that do not fit together.

    """

    session: Session
    events: Events
    wrapped: nn.Module
    optimizer: Optimizer
    schedule: Any
    strategy: Strategy
    precision: Precision
    windows: Windows
    step: Step
    saver: Saver | None
    eval_loader: ShardedLoader | None
    steps: int | None
    steps_per_epoch: int | None
    global_batch: int

    def __init__(  # noqa: PLR0915  # it keeps what it was given, line by line
        self,
        model: nn.Module | Callable[[], nn.Module],
        optimizer: Optimizer | Callable[[list[nn.Parameter]], Optimizer] | None = None,
        train_data: Any = None,
        *,
        loss: Callable[[Any, Any], Any] | None = None,
        target: str | None = None,
        training_step: Callable[[nn.Module, Any], Any] | None = None,
        prediction_step: Callable[[nn.Module, Any], tuple[Any, Any]] | None = None,
        weight: Callable[[Any], Any] | None = None,
        eval_data: Any = None,
        metrics: Any = None,
        monitor: str | None = None,
        larger_is_better: bool | None = None,
        evaluate_every: int | None = None,
        batch_size_per_rank: int | None = None,
        global_batch: int | None = None,
        accumulate: int = 1,
        shuffle: bool | None = None,
        drop_last: bool = False,
        loader_options: Mapping[str, Any] | None = None,
        eval_loader_options: Mapping[str, Any] | None = None,
        eval_batch_size: int | None = None,
        uneven: Uneven = "join",
        epochs: int | None = None,
        steps: int | None = None,
        max_time: str | float | None = None,
        schedule: Any = None,
        warmup: int = 0,
        scale_lr: Literal["linear", "sqrt"] | None = None,
        base_batch: int | None = None,
        precision: Literal["fp32", "bf16", "fp16"] = "fp32",
        strategy: str | Strategy = "ddp",
        sync_batchnorm: bool = False,
        activation_checkpointing: Sequence[type[nn.Module]] = (),
        compile: bool | Mapping[str, Any] = False,  # noqa: A002  # what torch calls it
        fused: bool = True,
        clip_norm: float | None = None,
        non_finite: Literal["stop", "skip"] = "stop",
        on_oom: Literal["raise", "split"] = "raise",
        callbacks: Iterable[Callback] = (),
        progress: bool = True,
        summary: bool = True,
        log_every: int = 50,
        checkpoint: str | Path | Checkpoints | None = None,
        resume: str | int | Path | None = None,
        seed: int = 0,
        deterministic: bool = False,
    ) -> None:
        self.model: Any = model  # a function until the ranks meet
        self.given_optimizer = optimizer
        self.train_data = train_data
        self.loss = loss
        self.target = target
        self._training_step = training_step
        self._prediction_step = prediction_step
        self.weight = weight
        self.eval_data = eval_data
        self.metrics = metrics
        self.monitor = monitor
        self.larger_is_better = larger_is_better
        self.evaluate_every = evaluate_every
        self.batch_size_per_rank = batch_size_per_rank
        self.wanted_global_batch = global_batch
        self.accumulate = accumulate
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.loader_options = dict(loader_options or {})
        self.eval_loader_options = self.loader_options if eval_loader_options is None else dict(eval_loader_options)
        self.eval_batch_size = eval_batch_size
        self.uneven: Uneven = uneven
        self.epochs = epochs
        self.wanted_steps = steps
        self.max_time_s = seconds(max_time)
        self.given_schedule = schedule
        self.warmup = warmup
        self.scale_lr = scale_lr
        self.base_batch = base_batch
        self.wanted_precision = precision
        self.wanted_strategy = strategy
        self.sync_batchnorm = sync_batchnorm
        self.activation_checkpointing = tuple(activation_checkpointing)
        self.compile = compile
        self.fused = fused
        self.clip_norm = clip_norm
        self.non_finite = non_finite
        self.on_oom = on_oom
        self.callbacks = list(callbacks)
        self.show_progress = progress
        self.show_summary = summary
        self.log_every = log_every
        self.checkpoint = Checkpoints(folder=checkpoint) if isinstance(checkpoint, (str, Path)) else checkpoint
        self.resume = resume
        self.seed = seed
        self.deterministic = deterministic
        checks.arguments(self)

        self.progress = Progress()
        self.report: Report | None = None
        self.results: dict[str, float] = {}
        self.best: tuple[float, int] | None = None
        self.evaluated_at = -1
        self.wants_to_stop: str | None = None
        self._notes: dict[str, float] = {}
        self._has_met = self._is_prepared = self._is_fitting = self._has_weights = False
        self._call: Call | None = None

    # What may be overwritten.

    def training_step(self, model: nn.Module, batch: Any) -> Any:
        """The loss of a batch: its mean over the samples, or over what `weight` counts.

        Args:
            model: what is to be called: with a strategy around the bare module.
            batch: on this rank's device.

        Returns:
            A scalar tensor, or a dict with it as ``loss`` and further numbers to report.

        """
        if self._training_step is not None:
            return self._training_step(model, batch)
        outputs, targets = self._called(model, batch)
        return checks.loss_in(outputs) if self.loss is None else self.loss(outputs, targets)

    def prediction_step(self, model: nn.Module, batch: Any) -> tuple[Any, Any]:
        """(outputs, targets) of a batch, for evaluation and prediction. `model` is in eval mode, without gradients."""
        if self._prediction_step is not None:
            return self._prediction_step(model, batch)
        return self._called(model, batch)

    def _called(self, model: nn.Module, batch: Any) -> tuple[Any, Any]:
        if self._call is None:
            self._call = Call(self.model, self.target)
        return self._call(model, batch)

    # What is done with it.

    def fit(self) -> Fit:
        """Train until `epochs` or `steps` are done, or somebody stops it.

        Raises:
            TrainError: what was given cannot be trained, or a loss is not finite.
            DataError: the data cannot be divided exactly.
            CheckpointError: `resume` names a checkpoint that is not there or does not fit.
            Preempted: a signal or `max_time` asked to end: all is saved, the exit code is 75.

        """
        checks.for_training(self)
        self._meet()
        if not self._is_prepared:
            prepare(self)
            self._is_prepared = True
        self.wants_to_stop = None
        self._is_fitting = True
        with Preemption(self.max_time_s, signals=self.saver is not None) as preemption:
            try:
                if self.show_summary:
                    print_summary(self)
                self.events.send("fit_start", self)
                reason = Loop(self, preemption).run()
                if self.saver is not None:
                    self.saver.finish()
            except Preempted:
                self.events.send("fit_end", self)
                raise
            except BaseException as error:
                self.events.send("exception", self, error)
                if self.saver is not None:
                    self.saver.abandon()
                raise
            finally:
                self._is_fitting = False
        self.events.send("fit_end", self)
        if reason not in ("epochs", "steps") and self.session.is_main:
            _log.info("training stopped at step %d: %s", self.progress.step, reason)
        return Fit(self.progress.step, self.progress.epoch, reason, self.results, self.best, self.report)

    def evaluate(self, data: Any = None, metrics: Any = None) -> dict[str, float]:
        """The mean loss and all metrics over the evaluation data, as one process would compute them.

        Args:
            data: in place of `eval_data`.
            metrics: in place of `metrics`.

        Returns:
            By name, ``loss`` among them where one is given. The same on every rank.

        """
        self._meet_to_evaluate()
        loader = self.eval_loader if data is None else evaluation_loader(self, data)
        chosen = self.metrics if metrics is None else metrics
        if loader is None:
            raise checks.no_evaluation_data(chosen)
        self.events.send("evaluate_start", self)
        try:
            with self._evaluating() as model:
                self.results = evaluate(
                    lambda batch: self.prediction_step(model, batch),
                    loader,
                    loss=self.loss,
                    weight=self.weight,
                    metrics=chosen,
                    move=lambda batch: to_device(batch, self.session.device),
                    collective_forward=model is not self.model,
                )
        except BaseException as error:
            if not self._is_fitting:  # fit() tells them otherwise
                self.events.send("exception", self, error)
            raise
        self.events.send("evaluate_end", self, self.results)
        return self.results

    def predict(self, data: Any) -> Any:
        """The model's outputs for all samples, in the order of the data.

        Args:
            data: a dataset, DataLoader, or what ``instep.shard`` gave.

        Returns:
            On the main rank the outputs of all samples, tensors along their first dimension on the CPU; None on the
            others.

        """
        self._meet_to_evaluate()
        loader = evaluation_loader(self, data)
        with self._evaluating() as model:
            return predict(
                lambda batch: self.prediction_step(model, batch)[0],
                loader,
                move=lambda batch: to_device(batch, self.session.device),
                collective_forward=model is not self.model,
            )

    def load(self, which: str | int | Path = "best") -> None:
        """Take the weights of a checkpoint, to evaluate them; all ranks call it. Nothing else of it is read.

        Args:
            which: ``"best"``, ``"latest"``, a step, or the path of a checkpoint.

        Raises:
            CheckpointError: there is none, or it is another model's.

        """
        self._meet()
        if self.checkpoint is None:
            raise checks.no_folder(which)
        saver = Saver(self, self.checkpoint)
        if (found := saver.look(which)) is not None:
            saver.load_model(found)
        self._has_weights = True

    # For callbacks.

    def log(self, values: Mapping[str, float]) -> None:
        """Add numbers to the next report: the same names on all ranks, or from a callback of the main rank."""
        self._notes.update({name: float(value) for name, value in values.items()})

    def stop(self, reason: str) -> None:
        """Ask for an end of training: all ranks agree on it soon, at the same step. Any rank may call it alone."""
        self.wants_to_stop = self.wants_to_stop or reason

    @property
    def folder(self) -> Path | None:
        """The run's folder, None where ``instep run`` did not start it."""
        return current_folder(os.environ)

    # For the loop.

    def _meet_to_evaluate(self) -> None:
        """Meet, and have the weights that `resume` asks for, also where fit() was not called."""
        self._meet()
        if self.resume is not None and not self._is_prepared and not self._has_weights:
            self.load(self.resume)

    def _meet(self) -> None:
        """Meet the other ranks, once."""
        if not self._has_met:
            if self.deterministic:
                seeds.make_deterministic()
            meet(self)
            self._has_met = True

    @contextmanager
    def _evaluating(self) -> Iterator[nn.Module]:
        """The module to evaluate with, without gradients; afterwards training goes on as if nothing had happened.

        It is the bare one, since DDP's forward pass may wait for other ranks, who may have fewer batches. An engine
        that holds parts of the parameters has to be called itself.
        """
        called: nn.Module = self.model
        if self._is_prepared and self.strategy.collective_forward:
            called = self.wrapped
        share_buffers(self.model, self.session)
        training = [module for module in called.modules() if module.training]
        called.eval()
        autocast = self.precision.autocast() if self._is_prepared else nullcontext()
        try:
            with seeds.undisturbed(), torch.no_grad(), autocast:
                yield called
        finally:
            for module in training:
                module.training = True

    def take_notes(self) -> dict[str, float]:
        """What was logged since the last call."""
        notes, self._notes = self._notes, {}
        return notes

    def judge(self, results: dict[str, float]) -> bool:
        """Whether the monitored value is the best so far; one decision for all ranks."""
        if self.monitor is None:
            return False
        value = agree(checks.monitored(self.monitor, results), how="main")
        if isinstance(self.schedule, ReduceLROnPlateau):
            self.schedule.step(value)
        best = math.nan if self.best is None else self.best[0]
        larger = self.larger_is_better if self.larger_is_better is not None else checks.larger_is_better(self.monitor)
        better = not math.isnan(value) and (math.isnan(best) or (value > best if larger else value < best))
        if better:
            self.best = (value, self.progress.step)
        return better
