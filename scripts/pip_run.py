"""Run the pip of `.venv`: progress for the person, the rest in the log, failures in one line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

_OFFLINE = re.compile(
    r"NewConnectionError|NameResolutionError|Max retries exceeded|Connection refused|Connection broken"
    r"|ProxyError|Temporary failure in name resolution|Name or service not known|Network is unreachable"
    r"|TimeoutError|Read timed out|SSLError|Remote end closed connection|Connection reset"
)
_NOT_FOUND = re.compile(r"No matching distribution found for (\S+)")
_NOISE = re.compile(r" is ignored: |^WARNING: Retrying \(Retry\(total=[1-9]")
_STARTS = ("Collecting ", "Processing ", "Requirement already satisfied")
_MISDIRECTING = (
    "PIP_TARGET",
    "PIP_PREFIX",
    "PIP_ROOT",
    "PIP_USER",
    "PIP_QUIET",
    "PIP_NO_DEPS",
    "PIP_DRY_RUN",
)


class SetupError(Exception):
    """The set-up cannot go on. One line: what is wrong, and what to do."""


class PipError(SetupError):
    """pip ended with an error. `tail`: the last lines it wrote."""

    def __init__(self, line: str, tail: list[str], *, not_found: bool = False, offline: bool = False) -> None:
        super().__init__(line)
        self.tail = tail
        self.not_found = not_found
        self.offline = offline


def pinned(lock: Path) -> set[str]:
    """Names of the packages in a lock file, as it spells them (canonical)."""
    return {line.partition("==")[0] for line in lock.read_text().splitlines() if "==" in line}


def diagnose(output: str, log: Path) -> PipError:
    """Say in one line what stopped pip, from what it wrote."""
    lines = [line for line in map(str.rstrip, output.splitlines()) if line and not _NOISE.search(line)]
    tail = [line if len(line) < 200 else line[:200] + " ..." for line in lines[-6:]]
    missing = _NOT_FOUND.search(output)
    offline = _OFFLINE.search(output) is not None
    if "No space left on device" in output:
        line = "the disk is full; make room (or set TMPDIR to a folder with more), and run again"
    elif "DO NOT MATCH THE HASHES" in output:
        line = (
            "a package is not the file that the lock names; empty pip's cache (.venv/bin/pip cache purge), "
            "or use another index (PIP_INDEX_URL)"
        )
    elif offline:
        line = (
            "pip cannot reach its package index; connect to the network, or set PIP_INDEX_URL to an index "
            "within reach, and run again"
        )
    elif missing:
        python = "{}.{}".format(*sys.version_info)
        line = (
            f"pip's package index has no {missing[1]} for Python {python} on this machine; "
            "use another index (PIP_INDEX_URL)"
        )
    else:
        line = f"pip failed; the whole log is in {log}"
    return PipError(line, tail, not_found=missing is not None, offline=offline)


def _packages(count: int) -> str:
    return "1 package" if count == 1 else f"{count} packages"


class _Progress:
    """Counts packages on one line of a terminal, or as a line now and then elsewhere."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._live = sys.stdout.isatty()
        self._say(f"  fetching {_packages(total)}")

    def see(self, line: str) -> None:
        if line.startswith(_STARTS):
            self._done += 1
            if self._live or self._done % 25 == 0:
                self._say(f"  fetching {_packages(self._total)}, now number {min(self._done, self._total)}")
        elif line.startswith("Installing collected packages"):
            self._say(f"  installing {_packages(self._total)}")

    def close(self) -> None:
        if self._live:
            print(flush=True)

    def _say(self, text: str) -> None:
        print(f"\r{text}\033[K" if self._live else text, end="" if self._live else "\n", flush=True)


def run_pip(venv: Path, arguments: list[str], lock: Path | None = None) -> None:
    """Run `pip ARGUMENTS`, showing progress through the packages of `lock`. Raises PipError."""
    progress = _Progress(len(pinned(lock))) if lock else None
    environment = {
        name: value for name, value in os.environ.items() if name not in _MISDIRECTING and not name.startswith("PYTHON")
    }
    environment.update(
        PIP_DISABLE_PIP_VERSION_CHECK="1", PIP_NO_INPUT="1", PIP_PROGRESS_BAR="off", PYTHONUNBUFFERED="1"
    )
    command = [str(venv / "bin" / "python"), "-m", "pip", "--no-color", *arguments]
    log = venv / "setup.log"
    output: list[str] = []
    with log.open("a") as file:
        file.write(f"$ {' '.join(command)}\n")
        with subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment,
        ) as pip:
            assert pip.stdout is not None
            for line in pip.stdout:
                output.append(line)
                file.write(line)
                if progress:
                    progress.see(line)
    if progress:
        progress.close()
    if pip.returncode != 0:
        raise diagnose("".join(output), log)
