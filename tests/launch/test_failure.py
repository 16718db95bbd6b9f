"""Events -> the rank that failed first, and the words for it."""

from __future__ import annotations

import pytest

from instep.launch.running.failure import LONG_WINDOW, WINDOW, Event, decide_at, event_of_end, first_failure, headline

LOST = "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711"


def _killed(rank: int, time: float, number: int = 9) -> Event:
    event = event_of_end(rank, -number, time)
    assert event is not None
    return event


def _left(rank: int, time: float, code: int = 1) -> Event:
    event = event_of_end(rank, code, time)
    assert event is not None
    return event


def _raised(rank: int, time: float, message: str = "bad", kind: str = "ValueError") -> Event:
    return Event(rank, time, 1, type=kind, message=message)


def _lost(rank: int, time: float, message: str = LOST, kind: str = "RuntimeError") -> Event:
    return _raised(rank, time, message, kind)


@pytest.mark.parametrize(
    ("events", "culprit"),
    [
        ([_raised(2, 1.0)], 2),
        ([_raised(2, 1.0), _raised(0, 0.9)], 0),
        ([_lost(0, 1.0), _lost(2, 1.001), _killed(1, 1.02)], 1),
        ([_lost(0, 1.0), _left(0, 1.01), _killed(1, 1.02)], 1),  # the end of rank 0 follows from its exception
        ([_lost(0, 1.0), _raised(1, 1.1)], 1),
        ([_lost(0, 1.0), _left(1, 1.1, 13)], 1),
        ([_killed(1, 1.0), _killed(0, 1.1, 6)], 1),
        ([_raised(1, 1.0), _killed(0, 1.1, 6)], 1),
        ([_lost(0, 1.0), _lost(1, 0.9)], 1),
        ([_lost(0, 1.0, "Broken pipe", "torch.distributed.DistNetworkError"), _left(1, 2.0, 3)], 1),
        ([_lost(0, 1.0, "failed to recv, got 0 bytes", "torch.distributed.DistNetworkError"), _killed(1, 2.0)], 1),
        ([_lost(0, 1.0, "rank 1 is missing", "instep.errors.StepError"), _killed(1, 2.0)], 1),
        # An error that only sounds like it, of a script's own making
        ([_lost(0, 1.0, "connection closed", "myproject.Problem"), _raised(1, 1.1)], 0),
        ([_raised(0, 1.0, "size mismatch", "RuntimeError"), _raised(1, 1.1)], 0),
    ],
)
def test_who_failed_first(events: list[Event], culprit: int) -> None:
    assert first_failure(events).rank == culprit
    assert first_failure(events[::-1]).rank == culprit


def test_when_it_is_decided() -> None:
    assert decide_at([_raised(0, 5.0)]) == 5.0 + WINDOW
    assert decide_at([_lost(0, 5.0)]) == 5.0 + LONG_WINDOW
    assert decide_at([_lost(0, 5.0), _killed(1, 5.5)]) == 5.0 + WINDOW


@pytest.mark.parametrize("status", [0, 75])
def test_a_good_end_is_no_event(status: int) -> None:
    assert event_of_end(0, status, 1.0) is None


@pytest.mark.parametrize(
    ("event", "memory", "text"),
    [
        (_raised(1, 0.0, "bad batch"), "", "rank 1 on h failed: ValueError: bad batch"),
        (_raised(1, 0.0, "", "KeyError"), "", "rank 1 on h failed: KeyError"),
        (_lost(0, 0.0, "no rank 3", "instep.errors.JoinError"), "", "rank 0 on h failed: JoinError: no rank 3"),
        (_left(3, 0.0, 13), "", "rank 3 on h failed: it left with exit code 13"),
        (
            _killed(1, 0.0),
            "",
            (
                "rank 1 on h failed: killed by signal 9 (SIGKILL), often the out-of-memory killer: "
                "see  dmesg -T | grep -i killed"
            ),
        ),
        (_killed(1, 0.0), "by X", "rank 1 on h failed: killed by signal 9 (SIGKILL), by X"),
        (_killed(1, 0.0, 11), "", "rank 1 on h failed: killed by signal 11 (SIGSEGV), in compiled code"),
        (_killed(1, 0.0, 40), "", "rank 1 on h failed: killed by signal 40"),
    ],
)
def test_the_headline(event: Event, memory: str, text: str) -> None:
    assert headline(event, "h", memory=memory) == text
