"""How long a stream may go without a token: no longer than the faults that it met account for. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from dynamo_local.core.messages.tokens import TokenDelta
from tests.chaos.faults import Kind, excused_s

NOTICED_S = 0.5
"""Shorter gaps are not looked at."""

TRIAL_S = 45.0
"""How long a request that is to be tried alone (core/request/suspicion.py) may wait for its turn: engines die here so
often that several requests wait, one after the other."""

_KEPT_S = 300.0
_SCHEDULED = 2
_DETAILS = 20


@dataclass(frozen=True)
class Window:
    """A time in which a fault may keep a stream waiting. Times are CLOCK_MONOTONIC."""

    kind: Kind
    begin: float
    end: float


class Gaps(msgspec.Struct):
    """Of many streams: the longest gap that a fault had a part in, by kind; and those that were too long."""

    longest_s: dict[str, float] = {}
    too_long: list[str] = []
    too_long_count: int = 0

    def plus(self, other: Gaps) -> Gaps:
        """Both together."""
        kinds = self.longest_s.keys() | other.longest_s.keys()
        longest_s = {kind: max(self.longest_s.get(kind, 0.0), other.longest_s.get(kind, 0.0)) for kind in kinds}
        return Gaps(longest_s, [*self.too_long, *other.too_long], self.too_long_count + other.too_long_count)


class GapWatch:
    """Judges each gap by the faults that its stream has met: those of all streams, and those of the places (leases of
    workers) where it was. `slack_s`: for a machine that has other things to do."""

    def __init__(self, slack_s: float) -> None:
        self.gaps = Gaps()
        self._slack_s = slack_s
        self._of_all: list[Window] = []
        self._at: dict[str, Window] = {}
        self._met: defaultdict[str, list[Window]] = defaultdict(list)

    def strike(self, kind: Kind, at: float, seconds: float, places: Iterable[str] | None) -> None:
        """A fault that lasts so long was done to these places, or to all streams."""
        window = Window(kind, at, at + excused_s(kind, seconds))
        if places is None:
            self._of_all = [each for each in self._of_all if each.end > at - _KEPT_S]
            self._of_all.append(window)
            return
        self._at = {place: each for place, each in self._at.items() if each.end > at - _KEPT_S}
        self._at |= dict.fromkeys(places, window)

    def lost(self, request: str, place: str, waited_since: float | None) -> Kind | None:
        """The stream goes on elsewhere. `waited_since`: it had got nothing there, and nobody knows what it waited for
        until the fault. Returns what was last done to the place."""
        window = self._at.get(place)
        if window is None:
            return None
        begin = window.begin if waited_since is None else min(waited_since, window.begin)
        self._met[request].append(Window(window.kind, begin, window.end))
        return window.kind

    def suspected(self, request: str, kind: Kind, now: float) -> None:
        """The stream waits for its trial."""
        self._met[request].append(Window(kind, now, now + TRIAL_S))

    def ended(
        self, request: str, place: str | None, begin: float, end: float, waits: Sequence[tuple[float, float]] = ()
    ) -> None:
        """A gap of this stream, which is at this place, is over. `waits`: when it waited for room there."""
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
        """The request has ended."""
        self._met.pop(request, None)


def uncovered_s(begin: float, end: float, windows: Iterable[tuple[float, float]]) -> float:
    """How much of the time from `begin` to `end` lies in none of the windows."""
    left_s, covered_until = 0.0, begin
    for start, stop in sorted(windows):
        left_s += max(0.0, min(start, end) - covered_until)
        covered_until = max(covered_until, stop)
    return left_s + max(0.0, end - covered_until)


def waits_of(delta: TokenDelta) -> list[tuple[float, float]]:
    """When the request waited for room at its worker, as the delta says that came after it."""
    waits: list[tuple[float, float]] = []
    since: float | None = None
    for event, at in delta.events:
        if event != _SCHEDULED:
            since = at
        elif since is not None:
            waits.append((since, at))
            since = None
    return waits
