"""What may happen beside training, one file each: what changes training on all ranks, what writes on the main one."""

from instep.train.callbacks.defaults import default_callbacks
from instep.train.callbacks.early_stop import EarlyStop
from instep.train.callbacks.ema import EMA
from instep.train.callbacks.gradients import GradientStats
from instep.train.callbacks.log import MetricsLog
from instep.train.callbacks.profiler import Profiler
from instep.train.callbacks.progress import ProgressBar
from instep.train.callbacks.rates import LearningRates
from instep.train.callbacks.tensorboard import TensorBoard
from instep.train.callbacks.throughput import Throughput

__all__ = [
    "EMA",
    "EarlyStop",
    "GradientStats",
    "LearningRates",
    "MetricsLog",
    "Profiler",
    "ProgressBar",
    "TensorBoard",
    "Throughput",
    "default_callbacks",
]
