"""What is said and done while circusd does not answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from dynamo_local.core.process.circus_deadlines import CircusDeadlines
from dynamo_local.supervisor.server.report import Report


@dataclass
class CircusSilence:
    """Of one client. `give_up` ends circusd, where that is up to the client's process."""

    report: Report
    patience: CircusDeadlines = field(default_factory=CircusDeadlines)
    give_up: Callable[[], None] | None = None
    _told_s: float | None = field(default=None, init=False)
    _gave_up: bool = field(default=False, init=False)

    def lasts(self, silent_s: float) -> None:
        """circusd has not answered for so long."""
        if self._gave_up:
            return
        if self.give_up is not None and self.patience.ends(silent_s):
            self._gave_up = True
            self.report.step(f"circusd has not answered for {silent_s:.0f} s; it is killed")
            self.give_up()
        elif self.patience.tells(silent_s, self._told_s):
            self._told_s = silent_s
            self.report.step(f"circusd has not answered for {silent_s:.0f} s; retrying")

    def ends(self) -> None:
        """Note that circusd has answered, or that another one is in its place."""
        if self._told_s is not None and not self._gave_up:
            self.report.step("circusd answers again")
        self._told_s, self._gave_up = None, False
