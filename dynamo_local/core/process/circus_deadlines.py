"""When a daemon that does not answer is told of, and when it is taken for dead. Pure.

A daemon may be stopped, or starved by others for many seconds, and goes on afterwards: silence is no death.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CircusDeadlines:
    """`report_after_s` of silence it is told of, and again whenever that time has doubled. `give_up_after_s`: it is
    ended then, as nothing can be started or stopped without it."""

    report_after_s: float = 10.0
    give_up_after_s: float = 120.0

    def tells(self, silent_s: float, told_s: float | None) -> bool:
        """Whether to tell of it. `told_s`: how long it had been when it was told of last; None: not yet."""
        return silent_s >= (self.report_after_s if told_s is None else 2 * told_s)

    def ends(self, silent_s: float) -> bool:
        """Whether to wait no longer."""
        return silent_s >= self.give_up_after_s
