"""Reads from other machines, which count only once the source has confirmed the pin after the read.

A one-sided read does not notice that blocks are reused, and two machines have no clock in common. So the order decides:
all ranks have read, then the source is asked, then what was read counts. Pure: times are arguments.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass


@dataclass
class _Read:
    pin: str
    until: float
    ranks: int = 0
    """Ranks whose part has ended."""
    is_settled: bool = False


class Confirmations:
    """Reads of one engine that are to be confirmed. `ranks`: worker processes, each of which reads its part.

    Invariant: `take` says of a read that it counts only if all ranks had ended it when `settle` was told that its pin
    had been held.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._reads: dict[str, _Read] = {}
        """By request."""
        self._asking: dict[str, Future[bool]] = {}
        """Answers that wait for the end of a read, by pin."""
        self._verdicts: dict[str, bool] = {}

    def __len__(self) -> int:
        return len(self._reads)

    def begin(self, request_id: str, pin: str, until: float) -> None:
        """Note a read that is about to begin. It does not count if it is not settled before `until`."""
        self._reads[request_id] = _Read(pin, until)

    def note(self, ended: Mapping[str, int]) -> None:
        """Note on how many ranks more the reads of these requests have ended."""
        for request_id, ranks in ended.items():
            if (read := self._reads.get(request_id)) is None:
                continue
            read.ranks += ranks
            if read.ranks >= self._ranks:
                self._answer(read.pin, ended=True)

    def fail(self, requests: Iterable[str]) -> None:
        """Settle the reads of these requests, of which a rank has not got its part: the others are not to wait."""
        for request_id in requests:
            if (read := self._reads.get(request_id)) is not None:
                self.settle(read.pin, held=False)

    def ended(self, pin: str) -> Future[bool]:
        """Answer with True once the read under this pin has ended everywhere, with False once it is settled."""
        asking = self._asking.setdefault(pin, Future())
        if (read := self._read_of(pin)) is not None and (read.is_settled or read.ranks >= self._ranks):
            self._answer(pin, ended=not read.is_settled)
        return asking

    def settle(self, pin: str, held: bool) -> None:
        """The source has held the pin until after the read, or nobody knows. Of a read, the first word counts."""
        self._answer(pin, ended=False)
        for request_id, read in self._reads.items():
            if read.pin == pin and not read.is_settled:
                read.is_settled = True
                self._verdicts[request_id] = held and read.ranks >= self._ranks

    def expire(self, now: float) -> None:
        """Settle the reads whose time is over: nobody may be left to do it."""
        for pin in [read.pin for read in self._reads.values() if read.until <= now and not read.is_settled]:
            self.settle(pin, held=False)

    def take(self) -> dict[str, bool]:
        """Take the verdicts that were not taken yet, by request: whether what was read counts."""
        verdicts, self._verdicts = self._verdicts, {}
        return verdicts

    def forget(self, request_id: str) -> None:
        """The workers have reported the end of the request's read, or it does not read."""
        read = self._reads.pop(request_id, None)
        self._verdicts.pop(request_id, None)
        if read is not None:
            self._answer(read.pin, ended=False)

    def _read_of(self, pin: str) -> _Read | None:
        return next((read for read in self._reads.values() if read.pin == pin), None)

    def _answer(self, pin: str, *, ended: bool) -> None:
        asking = self._asking.pop(pin, None)
        if asking is not None and not asking.done():
            asking.set_result(ended)
