"""A command on a terminal of 80 columns."""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
import termios
import threading
from collections.abc import Mapping, Sequence
from typing import Self

from tests.integration.server_process import PATIENCE_S


class Terminal:
    """A command, the terminal that it runs on, and all that it has written there."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        self._ours, self.theirs = pty.openpty()
        termios.tcsetwinsize(self.theirs, (24, 80))
        self.before = termios.tcgetattr(self.theirs)
        self.written = b""
        self.process = subprocess.Popen(
            command,
            env={**environ, "TERM": "xterm"},
            stdin=self.theirs,
            stdout=self.theirs,
            stderr=self.theirs,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.theirs)
        self._reader.join(PATIENCE_S)
        os.close(self._ours)

    def _read(self) -> None:
        # The end of a terminal whose other side is closed is an error.
        with contextlib.suppress(OSError):
            while data := os.read(self._ours, 65536):
                self.written += data

    def type(self, keys: bytes) -> None:
        os.write(self._ours, keys)
