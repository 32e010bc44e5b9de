"""Logging for loops that meet the same trouble again and again."""

from __future__ import annotations

import logging


class LogOnce:
    """Logs a warning when it begins or changes, and not each time it is met."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._logged = ""

    def warn(self, text: str) -> None:
        """Log `text` once until it changes, or until `clear`."""
        if text != self._logged:
            self._log.warning("%s", text)
        self._logged = text

    def clear(self) -> None:
        """The trouble is over: the next warning is logged, whatever it says."""
        self._logged = ""
