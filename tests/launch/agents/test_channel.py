"""The connection between launcher and agent: whole messages, whatever the pipes do."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from instep.launch.agents.channel import Channel

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    one_in, other_out = os.pipe()
    other_in, one_out = os.pipe()
    yield Channel(one_in, one_out), Channel(other_in, other_out)
    for descriptor in (one_in, other_out, other_in, one_out):
        with suppress(OSError):  # a test has closed it
            os.close(descriptor)


def test_messages_arrive_whole_and_in_order(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    sent = [{"output": {"rank": number, "data": "x" * 1000 * number}} for number in range(200)]
    for message in sent:
        one.send(message)
    assert one.waiting > 1 << 20, "more than a pipe holds"
    found: list[dict[str, object]] = []
    while len(found) < len(sent):
        found += other.receive()
        one.flush()
    assert found == sent
    assert not one.waiting


def test_half_a_message_waits_for_its_rest(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    os.write(one.sink, b'{"pi')
    assert other.receive() == []
    os.write(one.sink, b'ng":1}\n{"end":null}\n{')
    assert other.receive() == [{"ping": 1}, {"end": None}]


def test_what_a_login_script_prints_is_no_message(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    os.write(one.sink, b'Welcome to n1!\n42\n"x"\n\xff\n\n{"hello":{}}\n')
    assert other.receive() == [{"hello": {}}]
    assert list(other.noise) == ["Welcome to n1!", "42", '"x"', "\ufffd"]


def test_the_end_is_seen_after_the_last_message(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    one.send({"swept": []})
    os.close(one.sink)
    assert other.receive() == [{"swept": []}]
    assert other.is_closed


def test_nobody_reads_any_more(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    os.close(other.source)
    one.send({"ping": 1})
    assert not one.waiting


def test_when_something_was_heard(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    before = other.heard_at
    time.sleep(0.01)
    other.receive()
    assert other.heard_at == before
    one.send({"ping": 1})
    other.receive()
    assert other.heard_at > before
