"""Judges gaps of streams: a gap must not be longer than the faults that the stream has met explain. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from dynamo_local.core.messages.work import TokenDelta
from tests.chaos.faults import Kind, allowed_gap_s

NOTICED_S = 0.5
"""Minimum length of gaps that are judged, in seconds."""

TRIAL_S = 45.0
"""Time for which a suspected request may wait for its trial (core/request/recovery.py), in seconds. Engines die so
often in these runs that several requests wait for their trials at a time."""

_KEPT_S = 300.0
_SCHEDULED = 2
_DETAILS = 20


@dataclass(frozen=True)
class Window:
    """A time within which a fault may delay a stream. Times are CLOCK_MONOTONIC."""

    kind: Kind
    begin: float
    end: float


class Gaps(msgspec.Struct):
    """Gaps of many streams: the longest one at a fault, by kind of fault, and those that were too long."""

    longest_s: dict[str, float] = {}
    too_long: list[str] = []
    too_long_count: int = 0

    def plus(self, other: Gaps) -> Gaps:
        """Return the sum of both."""
        kinds = self.longest_s.keys() | other.longest_s.keys()
        longest_s = {kind: max(self.longest_s.get(kind, 0.0), other.longest_s.get(kind, 0.0)) for kind in kinds}
        return Gaps(longest_s, [*self.too_long, *other.too_long], self.too_long_count + other.too_long_count)


class GapWatch:
    """Judges each gap by the faults that its stream has met: faults that hit all streams, and faults of the places
    (leases of workers) where the stream was. `slack_s`: allowed excess, for a busy machine."""

    def __init__(self, slack_s: float) -> None:
        self.gaps = Gaps()
        self._slack_s = slack_s
        self._of_all: list[Window] = []
        self._at: dict[str, Window] = {}
        self._met: defaultdict[str, list[Window]] = defaultdict(list)

    def record_fault(self, kind: Kind, at: float, seconds: float, places: Iterable[str] | None) -> None:
        """Record a fault of `seconds` at these places; None: at all streams."""
        window = Window(kind, at, at + allowed_gap_s(kind, seconds))
        if places is None:
            self._of_all = [each for each in self._of_all if each.end > at - _KEPT_S]
            self._of_all.append(window)
            return
        self._at = {place: each for place, each in self._at.items() if each.end > at - _KEPT_S}
        self._at |= dict.fromkeys(places, window)

    def lost(self, request: str, place: str, waited_since: float | None) -> Kind | None:
        """Record that a stream has lost its place, and goes on elsewhere. Returns the last fault of the place.

        `waited_since`: start of the stream's wait if it got no token at the place. That wait is excused too, since its
        cause is unknown."""
        window = self._at.get(place)
        if window is None:
            return None
        begin = window.begin if waited_since is None else min(waited_since, window.begin)
        self._met[request].append(Window(window.kind, begin, window.end))
        return window.kind

    def suspected(self, request: str, kind: Kind, now: float) -> None:
        """Record that the stream's request waits for a trial."""
        self._met[request].append(Window(kind, now, now + TRIAL_S))

    def ended(
        self, request: str, place: str | None, begin: float, end: float, waits: Sequence[tuple[float, float]] = ()
    ) -> None:
        """Judge a gap of a stream at this place. `waits`: times at which the stream waited for room there."""
        if end - begin < NOTICED_S:
            return
        here = self._at.get(place) if place is not None else None
        windows = [*self._of_all, *self._met.get(request, ()), *([] if here is None else [here])]
        met = [each for each in windows if each.begin < end and each.end > begin]
        for window in met:
            name = window.kind.value
            self.gaps.longest_s[name] = max(self.gaps.longest_s.get(name, 0.0), round(end - begin, 2))
        left_s = uncovered_s(begin, end, [*((each.begin, each.end) for each in met), *waits])
        if left_s > self._slack_s:
            self.gaps.too_long_count += 1
            if len(self.gaps.too_long) < _DETAILS:
                faults = ", ".join(f"{each.kind.value} at {each.begin - begin:+.1f} s" for each in met) or "no fault"
                self.gaps.too_long.append(
                    f"{request} had no token for {end - begin:.1f} s, {left_s:.1f} s of it unaccounted for ({faults})"
                )

    def over(self, request: str) -> None:
        """Forget a request that has ended."""
        self._met.pop(request, None)


def uncovered_s(begin: float, end: float, windows: Iterable[tuple[float, float]]) -> float:
    """Return how much of the time from `begin` to `end` lies in none of the windows."""
    left_s, covered_until = 0.0, begin
    for start, stop in sorted(windows):
        left_s += max(0.0, min(start, end) - covered_until)
        covered_until = max(covered_until, stop)
    return left_s + max(0.0, end - covered_until)


def waits_of(delta: TokenDelta) -> list[tuple[float, float]]:
    """Return the times at which a request waited for room at its worker, by the events in a later delta."""
    waits: list[tuple[float, float]] = []
    since: float | None = None
    for event, at in delta.events:
        if event != _SCHEDULED:
            since = at
        elif since is not None:
            waits.append((since, at))
            since = None
    return waits
