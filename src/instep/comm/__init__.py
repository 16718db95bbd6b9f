"""Talk to the other ranks: join and leave, decide together, exact means, named barriers.

All pieces work in a world of one, and over a process group that the user made with torch alone.
"""

from instep.comm.agreement import agree
from instep.comm.barriers import barrier
from instep.comm.join import init
from instep.comm.leave import close
from instep.comm.logs import get_logger
from instep.comm.means import mean, total
from instep.comm.objects import broadcast_object, gather_objects
from instep.comm.order import main_first, main_only
from instep.comm.session import Session, is_main, rank, world_size

__all__ = [
    "Session",
    "agree",
    "barrier",
    "broadcast_object",
    "close",
    "gather_objects",
    "get_logger",
    "init",
    "is_main",
    "main_first",
    "main_only",
    "mean",
    "rank",
    "total",
    "world_size",
]
