"""What a recorded run has in each of its Python processes: $PYTHONPATH names this folder, and $DYN_RECORD the record.

Notes the start of the process, and the seconds that imports of vLLM and of what it stands on take.
"""

from __future__ import annotations

import importlib.machinery
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from types import ModuleType

WATCHED = frozenset({"torch", "transformers", "vllm"})
LEAST_S = 0.05
"""Imports that take less are not noted."""


def note(kind: str, **values: object) -> None:
    """Add a line to the record of the run, if there is one. Lines of all processes get into one file, whole."""
    path = os.environ.get("DYN_RECORD")
    if path:
        test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
        line = json.dumps({"kind": kind, "pid": os.getpid(), "test": test, **values}, ensure_ascii=False) + "\n"
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        # Arguments of commands may be no text.
        os.write(file, line.encode(errors="replace"))
        os.close(file)


class WatchedImports:
    """A finder that has the outermost imports of watched packages timed."""

    def __init__(self) -> None:
        self._busy = False

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if self._busy or name.partition(".")[0] not in WATCHED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            # Of this one loader, which stays what it is for all who ask it for more.
            spec.loader.exec_module = self._timed(name, spec.loader.exec_module)  # type: ignore[assignment, method-assign]
        return spec

    def _timed(self, name: str, execute: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
        def timed(module: ModuleType) -> None:
            if self._busy:
                execute(module)
                return
            self._busy = True
            began, cpu = time.monotonic(), time.process_time()
            try:
                execute(module)
            finally:
                self._busy = False
                seconds = time.monotonic() - began
                if seconds >= LEAST_S:
                    note(
                        "import", name=name, seconds=seconds, cpu=time.process_time() - cpu, command=sys.orig_argv[1:6]
                    )

        return timed


if "DYN_RECORD" in os.environ and __name__ == "sitecustomize":
    sys.meta_path.insert(0, WatchedImports())
    note("process", command=sys.orig_argv[1:6])
