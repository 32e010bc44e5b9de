"""Modules that are imported before there is a service to import them.

A preload is a module whose import imports what services need. It may say more of itself:

    READ_LATER   names of environment variables that what it imports reads at use, not at import
    unfit()      why this process cannot be forked any more, or None
    settle()     called in each forked process, whose environment is in place
"""

from __future__ import annotations

import gc
import importlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

OWN_PREFIX = b"DYN_"
"""Variables of this project, which are read at use."""

_SHELLS_OWN = frozenset({b"_", b"SHLVL", b"OLDPWD"})


@dataclass(frozen=True)
class Preloaded:
    """What was imported, under which environment."""

    modules: tuple[ModuleType, ...]
    given: Mapping[bytes, bytes]
    cwd: str

    @classmethod
    def load(cls, names: Sequence[str]) -> Preloaded:
        """Import the modules, and make their memory fit to be shared. Raises what they raise."""
        given = dict(os.environb)
        modules = tuple(map(importlib.import_module, names))
        gc.collect()
        # A collection in a forked process would write to every object, and so copy all of the memory.
        gc.freeze()
        return cls(modules, given, str(Path.cwd()))

    def objection(self, environ: Mapping[bytes, bytes], cwd: str) -> str | None:
        """Why a process with this environment, in this directory, cannot be forked from this one."""
        if cwd != self.cwd:
            return f"its working directory is {cwd}, not {self.cwd}"
        late = {name.encode() for module in self.modules for name in getattr(module, "READ_LATER", ())}
        early = (
            {
                name
                for name in {*environ, *self.given}
                if environ.get(name) != self.given.get(name) and not name.startswith(OWN_PREFIX)
            }
            - late
            - _SHELLS_OWN
        )
        if early:
            names = ", ".join(sorted(map(os.fsdecode, early)))
            return f"its environment differs in {names}, which may have been read at import"
        return self._unfit()

    def _unfit(self) -> str | None:
        threads = len(list(Path("/proc/self/task").iterdir()))
        if threads != 1:
            return f"{threads} threads run in it"
        reasons = (getattr(module, "unfit", lambda: None)() for module in self.modules)
        return next((str(reason) for reason in reasons if reason is not None), None)

    def environ_for(self, environ: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
        """The environment of a process that had been given this one and then imported the modules: what they have set
        for themselves counts, as far as it does not differ on purpose."""
        result = dict(environ)
        for name, value in os.environb.items():
            if value != self.given.get(name) and environ.get(name) == self.given.get(name):
                result[name] = value
        return result

    def settle(self) -> None:
        """In a forked process, once its environment is in place."""
        for module in self.modules:
            getattr(module, "settle", lambda: None)()
