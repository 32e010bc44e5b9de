"""Other programs, run to their end by what tests with them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_LAST_LINES = 8


@dataclass(frozen=True)
class Ended:
    """How a program ended. `output`: what it wrote to standard output and standard error."""

    code: int
    output: str

    @property
    def last_lines(self) -> str:
        return "\n".join(self.output.splitlines()[-_LAST_LINES:])


def run(command: Sequence[str | Path], within_s: float, environ: Mapping[str, str] | None = None) -> Ended:
    """Run a program without input. `environ`: added to the environment. Raises subprocess.TimeoutExpired."""
    done = subprocess.run(
        [str(word) for word in command],
        env={**os.environ, **(environ or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=within_s,
        check=False,
    )
    return Ended(done.returncode, done.stdout)
