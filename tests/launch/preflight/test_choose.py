"""Who reached what -> where the ranks meet, or why they cannot."""

from __future__ import annotations

from typing import Any

import pytest

from instep.errors import RunError
from instep.launch.preflight.meeting import Meeting, Party, addresses_of, choose, whom

Interfaces = list[tuple[str, str]]
LAN: list[Interfaces] = [[("eth0", f"10.0.0.{n}")] for n in (1, 2, 3)]
TWO: list[Interfaces] = [[("eth0", f"10.0.0.{n}"), ("ib0", f"10.9.0.{n}")] for n in (1, 2, 3)]
DOCKER: list[Interfaces] = [[("docker0", "172.17.0.1"), ("eth0", f"10.0.0.{n}")] for n in (1, 2, 3)]


def facts(interfaces: Interfaces) -> dict[str, Any]:
    return {"interfaces": [["lo", "127.0.0.1", 8], *([*one, 24] for one in interfaces)]}


def parties(machines: list[Interfaces], *, broken: dict[tuple[int, str], str] | None = None) -> list[Party]:
    """Machines where an address is reached from the interface of the same network; `broken`: (from, address) -> why."""
    found = []
    for number, mine in enumerate(machines):
        reached: dict[str, dict[str, dict[str, str]]] = {}
        for other, theirs in enumerate(machines):
            reached[f"n{other + 1}"] = {}
            for _, address in theirs:
                own = next(((name, own) for name, own in mine if own.split(".")[1] == address.split(".")[1]), None)
                why = (broken or {}).get((number + 1, address))
                if address == "172.17.0.1" and other != number:
                    why = "refused"
                way = {"own": own[1], "interface": own[0], "there": address} if own else {"why": "no route"}
                reached[f"n{other + 1}"][address] = {"why": why} if why else way
        found.append(Party(f"n{number + 1}", facts(mine), reached))
    return found


def ways(name: str, network: int) -> Meeting:
    return Meeting(f"10.{network}.0.1", tuple((f"10.{network}.0.{n}", name) for n in (1, 2, 3)))


@pytest.mark.parametrize(
    ("machines", "broken", "hint", "expected"),
    [
        (LAN, {}, "", ways("eth0", 0)),
        (DOCKER, {}, "", ways("eth0", 0)),
        (TWO, {}, "", ways("eth0", 0)),
        (TWO, {}, "10.9.0.1", ways("ib0", 9)),
        (TWO, {}, "127.0.1.1", ways("eth0", 0)),
        (TWO, {}, "name.invalid", ways("eth0", 0)),
        (TWO, {(3, "10.0.0.1"): "no answer"}, "", ways("ib0", 9)),
        (TWO, {(3, "10.0.0.1"): "no answer"}, "10.0.0.1", ways("ib0", 9)),  # what is said does not work
        (TWO, {(3, "10.0.0.2"): "refused"}, "", ways("ib0", 9)),  # two others do not reach each other there
        (TWO, {(1, "10.0.0.3"): "refused"}, "", ways("ib0", 9)),  # nor the main machine one of them
    ],
)
def test_the_address_that_all_reach(
    machines: list[Interfaces], broken: dict[tuple[int, str], str], hint: str, expected: Meeting
) -> None:
    assert choose(parties(machines, broken=broken), hint) == expected


def test_the_interface_that_most_have() -> None:
    """Of two networks that serve, the one that is called the same on most machines."""
    machines = [[(f"eth{n}", f"10.0.0.{n}"), ("ib0", f"10.9.0.{n}")] for n in (1, 2, 3)]
    assert choose(parties(machines)) == ways("ib0", 9)


def test_each_machine_its_own_interface() -> None:
    machines = [[("eth0", "10.0.0.1")], [("ens3", "10.0.0.2")], [("bond0", "10.0.0.3")]]
    assert choose(parties(machines)).ways == (("10.0.0.1", "eth0"), ("10.0.0.2", "ens3"), ("10.0.0.3", "bond0"))


def test_one_machine_meets_on_the_loopback() -> None:
    assert choose(parties(LAN[:1])) == Meeting("127.0.0.1", (("127.0.0.1", ""),))


def test_behind_a_translation_of_addresses() -> None:
    """The address that the others use is held by no interface; the interface is the one where they arrive."""
    public = "203.0.113.7"
    found = []
    for party in parties(LAN):
        own = party.reached["n1"]["10.0.0.1"]
        found.append(
            Party(party.host, party.facts, {**party.reached, "n1": {public: own, "10.0.0.1": {"why": "no route"}}})
        )
    assert choose(found, public) == Meeting(public, ((public, "eth0"), ("10.0.0.2", "eth0"), ("10.0.0.3", "eth0")))
    unable = Party("n1", found[0].facts, {**found[0].reached, "n1": {public: {"why": "refused"}}})
    with pytest.raises(RunError, match="do not all reach n1"):  # rank 0 has to reach it too
        choose([unable, *found[1:]], public)


def test_no_address_at_all() -> None:
    with pytest.raises(RunError, match="n1, where the ranks were to meet, has no address but the loopback") as caught:
        choose(parties([[], *LAN[1:]]))
    assert caught.value.evidence == ("lo: 127.0.0.1",)


def test_nobody_reaches_it() -> None:
    with pytest.raises(RunError) as caught:
        choose(parties(TWO, broken={(2, "10.0.0.1"): "no answer", (3, "10.9.0.1"): "refused"}))
    assert caught.value.evidence == (
        "    10.0.0.1 (eth0)  10.9.0.1 (ib0)",
        "n2  no answer        reached",
        "n3  reached          refused",
    )


def test_many_missing_ways_are_cut_short() -> None:
    machines = [[("eth0", f"10.0.0.{n}")] for n in range(1, 8)]
    broken = {(a, f"10.0.0.{b}"): "refused" for a in range(1, 8) for b in range(2, 8) if a != b}
    with pytest.raises(RunError, match="but not each other") as caught:
        choose(parties(machines, broken=broken))
    assert caught.value.evidence[10:] == ("... and 26 more", "n1 is reached at 10.0.0.1")


def test_untried_is_no_fault() -> None:
    """With very many machines not every one tries every other."""
    found = [Party(p.host, p.facts, {"n1": p.reached["n1"]}) for p in parties(LAN)]
    assert choose(found) == ways("eth0", 0)


@pytest.mark.parametrize(
    ("count", "number", "tried"), [(3, 1, [0, 1, 2]), (40, 7, [0, 8, 9, 10]), (40, 38, [0, 39, 1])]
)
def test_whom_a_machine_tries(count: int, number: int, tried: list[int]) -> None:
    peers = [{"host": str(n)} for n in range(count)]
    assert [int(peer["host"]) for peer in whom(peers, number)] == tried


@pytest.mark.parametrize(
    ("address", "usable"),
    [
        ("10.0.0.1", True),
        ("169.254.3.4", True),
        ("fd00::1", True),
        ("fe80::1", False),
        ("127.0.0.1", False),
        ("127.0.1.1", False),
        ("::1", False),
        ("0.0.0.0", False),
        ("::", False),
        ("", False),
    ],
)
def test_addresses_worth_a_try(address: str, usable: bool) -> None:
    assert addresses_of({"interfaces": [["x", address, None]]}) == [address] * usable


def test_bridges_of_containers_come_last() -> None:
    names = ["docker0", "eth0", "br-1f3a", *(f"br-{n}" for n in range(20)), "ib0"]
    found = addresses_of({"interfaces": [[name, f"10.0.0.{n}", 24] for n, name in enumerate(names)]})
    assert found[:3] == ["10.0.0.1", "10.0.0.23", "10.0.0.0"]
    assert len(found) == 16
