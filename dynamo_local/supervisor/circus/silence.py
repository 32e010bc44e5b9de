"""Reports that circusd does not answer, and has it killed when that lasts too long."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from dynamo_local.core.process.restarts import CircusDeadlines
from dynamo_local.supervisor.server.reports.report import Report


@dataclass
class CircusSilence:
    """The silence towards one client. `kill` ends circusd; None in processes that only use it."""

    report: Report
    deadlines: CircusDeadlines = field(default_factory=CircusDeadlines)
    kill: Callable[[], None] | None = None
    _reported_s: float | None = field(default=None, init=False)
    _gave_up: bool = field(default=False, init=False)

    def lasts(self, silent_s: float) -> None:
        """Note that circusd has not answered for so long."""
        if self._gave_up:
            return
        if self.kill is not None and self.deadlines.give_up(silent_s):
            self._gave_up = True
            self.report.step(f"circusd has not answered for {silent_s:.0f} s; it is killed")
            self.kill()
        elif self.deadlines.report(silent_s, self._reported_s):
            self._reported_s = silent_s
            self.report.step(f"circusd has not answered for {silent_s:.0f} s; retrying")

    def ends(self) -> None:
        """Note that circusd has answered, or that another one has replaced it."""
        if self._reported_s is not None and not self._gave_up:
            self.report.step("circusd answers again")
        self._reported_s, self._gave_up = None, False
