"""Trouble that lasts: told once, and again when it changes."""

from __future__ import annotations

import logging


class LogOnce:
    """What is wrong now, for a loop that meets it again and again."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._told = ""

    def note(self, text: str) -> None:
        """It is this now: a warning, unless it was this already."""
        if text != self._told:
            self._log.warning("%s", text)
        self._told = text

    def over(self) -> None:
        """There is none now."""
        self._told = ""
