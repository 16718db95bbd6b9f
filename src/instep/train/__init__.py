"""The loop: a trainer that gives the same numbers on one rank and on many, thin over pieces that work alone."""

from instep.train.callbacks import (
    EMA,
    EarlyStop,
    GradientStats,
    LearningRates,
    MetricsLog,
    Profiler,
    ProgressBar,
    TensorBoard,
    Throughput,
)
from instep.train.checkpoints import CheckpointFolder, Checkpoints, export
from instep.train.evaluation import evaluate
from instep.train.events import Callback, on
from instep.train.metrics import Accuracy, Mean, Metric
from instep.train.prediction import predict
from instep.train.preemption import Preempted
from instep.train.state import Progress, Report
from instep.train.strategies import DDP, FSDP, HSDP, Strategy, Zero1
from instep.train.trainer import Fit, Trainer

__all__ = [
    "DDP",
    "EMA",
    "FSDP",
    "HSDP",
    "Accuracy",
    "Callback",
    "CheckpointFolder",
    "Checkpoints",
    "EarlyStop",
    "Fit",
    "GradientStats",
    "LearningRates",
    "Mean",
    "Metric",
    "MetricsLog",
    "Preempted",
    "Profiler",
    "Progress",
    "ProgressBar",
    "Report",
    "Strategy",
    "TensorBoard",
    "Throughput",
    "Trainer",
    "Zero1",
    "evaluate",
    "export",
    "on",
    "predict",
]
