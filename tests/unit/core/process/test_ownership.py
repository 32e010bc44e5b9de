"""A namespace has one owner at a time, whatever is lost, late or killed, and whatever the servers' clocks say."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.bus.jetstream.owner_record import decoded, encoded
from dynamo_local.core.process.ownership import (
    LEASE_S,
    Owner,
    Record,
    Refuse,
    Take,
    Watch,
    is_sure,
    judge,
    renewable,
)

SERVERS = 3
DRIFT = 0.02
"""How much faster or slower than another a clock may run."""


@dataclass
class Bus:
    """Has the record, and changes it only for who knows its revision."""

    record: Record = field(default_factory=Record)

    def replace(self, revision: int, owner: Owner) -> bool:
        if self.record.revision != revision:
            return False
        self.record = Record(revision + 1, owner)
        return True


@dataclass
class Sent:
    """A change under way. `sent_at`: by the sender's clock."""

    revision: int
    sent_at: float
    came_about: bool | None = None


@dataclass
class Server:
    """As supervisor/server/ownership.py goes by the rule, with each step taken apart."""

    name: str
    home: str
    offset: float
    rate: float
    mine: Owner = field(init=False)
    watch: Watch | None = None
    seen: Record | None = None
    sent: Sent | None = None
    revision: int | None = None
    renewed_at: float = 0.0
    over: bool = False

    def __post_init__(self) -> None:
        self.mine = Owner(self.name, self.home, self.name)

    def clock(self, now: float) -> float:
        return self.offset + now * self.rate

    def sure(self, now: float) -> bool:
        return not self.over and self.revision is not None and is_sure(self.mine, self.renewed_at, self.clock(now))

    def step(self, bus: Bus, now: float, outcome: str) -> None:
        """Send, have it arrive or get lost, or hear the answer, whatever is next."""
        if self.over:
            return
        if self.sent is None:
            self._begin(bus, now)
        elif self.sent.came_about is None and outcome != "lost":
            self.sent.came_about = bus.replace(self.sent.revision, self.mine)
        else:
            self._answered(bus, lost=outcome == "lost")

    def _begin(self, bus: Bus, now: float) -> None:
        at = self.clock(now)
        if self.revision is not None:
            self.sent = Sent(self.revision, at)
            return
        match judge(bus.record, self.mine, self.watch, at):
            case Take(revision):
                self.sent = Sent(revision, at)
            case Refuse():
                self.over = True
            case Watch() as watch:
                self.watch = watch

    def _answered(self, bus: Bus, *, lost: bool) -> None:
        sent, self.sent = self.sent, None
        assert sent is not None
        if lost:
            return
        if sent.came_about:
            self.revision, self.renewed_at = sent.revision + 1, sent.sent_at
        elif self.revision is not None:
            if renewable(bus.record, self.mine):
                self.revision = bus.record.revision
            else:
                self.over = True
        else:
            self.watch = None


TIMES = (0.0, 0.0, 0.1, 2.5, LEASE_S / 2, LEASE_S, LEASE_S * 1.03)
"""Times (s) that pass before a server does something; such as are near the ends of leases are what matters."""
steps = st.lists(
    st.tuples(
        st.integers(0, SERVERS - 1),
        st.sampled_from(TIMES) | st.floats(0, LEASE_S),
        st.lists(st.sampled_from(["", "", "", "lost"]), min_size=1, max_size=4),
    ),
    max_size=40,
)
clocks = st.lists(st.tuples(st.floats(-1e6, 1e6), st.floats(1 - DRIFT, 1 + DRIFT)), min_size=SERVERS, max_size=SERVERS)


@given(steps=steps, clocks=clocks)
def test_two_servers_are_never_sure_at_once(
    steps: list[tuple[int, float, list[str]]], clocks: list[tuple[float, float]]
) -> None:
    servers = [Server(f"s{n}", f"home{n}", offset, rate) for n, (offset, rate) in enumerate(clocks)]
    bus, now = Bus(), 0.0
    for number, passes_s, outcomes in steps:
        now += passes_s
        for outcome in outcomes:
            servers[number].step(bus, now, outcome)
        assert sum(server.sure(now) for server in servers) <= 1


@given(clocks=clocks)
def test_a_dead_owner_is_replaced_and_a_living_one_is_not(clocks: list[tuple[float, float]]) -> None:
    owner, other, late = (Server(f"s{n}", f"home{n}", *clock) for n, clock in enumerate(clocks))
    bus, now = Bus(), 0.0
    for _ in range(3):
        owner.step(bus, now, "")
    assert owner.sure(now)
    # Alive: it renews its record while another one looks.
    other.step(bus, now, "")
    for _ in range(3):
        now += 1.0
        owner.step(bus, now, "")
    other.step(bus, now, "")
    assert other.over
    # Dead: another one looks until the lease is over.
    late.step(bus, now, "")
    late.step(bus, now + LEASE_S * 0.9, "")
    assert late.sent is None
    for _ in range(3):
        late.step(bus, now + LEASE_S * (1 + 2 * DRIFT), "")
    assert late.sure(now + LEASE_S * (1 + 2 * DRIFT))


def test_a_server_takes_over_at_once_what_one_of_the_same_place_has_left() -> None:
    left = Record(7, Owner("before", "home", "host"))
    assert judge(left, Owner("after", "home", "host"), None, 0.0) == Take(7)
    assert isinstance(judge(left, Owner("after", "elsewhere", "host"), None, 0.0), Watch)
    # Where the place is not known, no two are the same.
    assert isinstance(judge(Record(7, Owner("before", "", "a")), Owner("after", "", "a"), None, 0.0), Watch)


def test_an_owner_goes_on_with_a_bus_that_has_lost_the_record() -> None:
    mine = Owner("mine", "home", "host")
    assert renewable(Record(), mine)
    assert renewable(Record(9, mine), mine)
    assert not renewable(Record(9, Owner("other", "home", "host")), mine)


# The record as it is stored: servers of several releases read it.

STORED = b"\x85\xa6server\xa1s\xa4home\xa2/h\xa4host\xa1m\xa7lease_s\xcb@$\x00\x00\x00\x00\x00\x00\xa1v\x02"


def test_the_form_of_a_record_stays() -> None:
    assert encoded(Owner("s", "/h", "m")) == STORED
    assert decoded(7, STORED) == Record(7, Owner("s", "/h", "m"))
    assert (encoded(None), decoded(7, b"")) == (b"", Record(7))


@pytest.mark.parametrize("data", [STORED[:-1] + b"\x03", STORED[:-1], b"\xc1", b"{}", b"\xa1\xff"])
def test_what_another_release_has_written_is_an_owner(data: bytes) -> None:
    owner = decoded(7, data).owner
    assert owner is not None
    assert (owner.server, owner.home) == ("", "")
