"""Barriers that say who is missing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from instep.comm.session import together
from instep.comm.waiting import store_gone, wait_for
from instep.errors import StepError

if TYPE_CHECKING:
    from torch.distributed import Store

    from instep.comm.session import Session


def barrier(name: str = "barrier", timeout: float | None = None) -> None:
    """Wait until all ranks are here.

    Args:
        name: what the place is called in errors; ranks that wait at different names do not meet.
        timeout: seconds to wait for the others; None: that of ``instep.init()``.

    Raises:
        StepError: some ranks did not come in time (they are named, with where they were last seen), or the ranks
            have not joined.

    """
    session = together(f"barrier({name!r})")
    if session.store is None or session.world_size == 1:
        return
    turn = session.turn(f"barrier {name}")
    limit = session.timeout if timeout is None else timeout
    if not meet(session.store, session.rank, session.world_size, f"{name} #{turn}", limit):
        raise _missing(session, name, turn, limit)
    if session.is_main and turn > 1:  # all ranks have passed the former turn: they have come to this one
        for key in ("count", "open"):
            session.store.delete_key(f"place/{name} #{turn - 1}/{key}")


def meet(store: Store, rank: int, world_size: int, place: str, timeout: float) -> bool:
    """Come to a place and wait there for all ranks; whether they all came.

    Raises:
        StepError: the process that holds the store is gone.

    """
    try:
        store.set(f"at/{rank}", place)
        everyone = store.add(f"place/{place}/count", 1) == world_size
        if everyone:
            store.set(f"place/{place}/open", "1")
            return True
    except RuntimeError as error:
        raise store_gone(error) from None

    def doing() -> str:
        return f"waiting at {place!r} for rank{_numbers(absent(store, world_size, place))}"

    return wait_for(store, [f"place/{place}/open"], timeout, doing)


def absent(store: Store, world_size: int, place: str) -> list[int]:
    """The ranks that have not come to the place."""
    return [rank for rank in range(world_size) if _last_seen(store, rank) != place]


def _last_seen(store: Store, rank: int) -> str:
    return bytes(store.get(f"at/{rank}")).decode() if store.check([f"at/{rank}"]) else ""


def _missing(session: Session, name: str, turn: int, limit: float) -> StepError:
    store, place = session.store, f"{name} #{turn}"
    assert store is not None  # a world of one misses nobody
    ranks = absent(store, session.world_size, place)
    evidence = []
    for rank in ranks[:20]:
        host = f" on {session.hosts[rank]}" if session.hosts else ""
        evidence.append(f"rank {rank}{host}: last seen at {_last_seen(store, rank) or 'no barrier so far'}")
    return StepError(
        f"barrier({name!r}) waited {limit:g} s for rank{_numbers(ranks)}, in vain.",
        evidence=evidence,
        cure="See what the missing ranks do instead (a barrier under `if rank == 0`, another name, an error, or only "
        "slow work: then give a longer timeout).",
    )


def _numbers(ranks: list[int]) -> str:
    """``s 1, 2 and 3`` or `` 1``, to go behind the word rank."""
    if len(ranks) == 1:
        return f" {ranks[0]}"
    shown = [str(rank) for rank in ranks[:20]] + (["..."] if len(ranks) > 20 else [])
    return f"s {', '.join(shown[:-1])} and {shown[-1]}" if shown else "s (all came just now)"
