"""Decides when a circusd that does not answer is reported, and when it is given up. Pure.

Silence alone is not death: circusd may be stopped, or starved by other programs for many seconds, and go on afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CircusDeadlines:
    """`report_after_s`: silence until the first report; each further report comes when the silence has doubled.
    `give_up_after_s`: silence until circusd is killed and replaced, as nothing can be started or stopped without it."""

    report_after_s: float = 10.0
    give_up_after_s: float = 120.0

    def report(self, silent_s: float, reported_s: float | None) -> bool:
        """Whether to report the silence. `reported_s`: its length at the last report; None if there was none."""
        return silent_s >= (self.report_after_s if reported_s is None else 2 * reported_s)

    def give_up(self, silent_s: float) -> bool:
        """Whether to wait no longer."""
        return silent_s >= self.give_up_after_s
