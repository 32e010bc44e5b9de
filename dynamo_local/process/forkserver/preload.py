"""Preloads: modules that the fork server imports for the services that are forked from it.

A preload is a module that imports what services need. It may define:

    READ_LATER   names of environment variables that the imported code reads at use, not at import
    unfit()      returns why this process cannot be forked any more, or None
    settle()     called in each forked process, once its environment is in place
"""

from __future__ import annotations

import gc
import importlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from dynamo_local.core.codec import prepare_structs

OWN_PREFIX = b"DYN_"
"""Environment variables of this project, which are all read at use."""

_SHELL_VARIABLES = frozenset({b"_", b"SHLVL", b"OLDPWD"})


@dataclass(frozen=True)
class Preloaded:
    """The imported modules. `given`: the environment before the import. `cwd`: the working directory."""

    modules: tuple[ModuleType, ...]
    given: Mapping[bytes, bytes]
    cwd: str

    @classmethod
    def load(cls, names: Sequence[str]) -> Preloaded:
        """Import the modules, and prepare their memory to be shared by forks. Raises what the imports raise."""
        given = dict(os.environb)
        modules = tuple(map(importlib.import_module, names))
        prepare_structs()
        settle_memory()
        return cls(modules, given, str(Path.cwd()))

    def objection(self, environ: Mapping[bytes, bytes], cwd: str) -> str | None:
        """The reason why a process with this environment and directory cannot be forked from this one, or None."""
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
            - _SHELL_VARIABLES
        )
        if early:
            names = ", ".join(sorted(map(os.fsdecode, early)))
            return f"its environment differs in {names}, which may have been read at import"
        return self.unfit()

    def unfit(self) -> str | None:
        """The reason why this process cannot be forked, or None."""
        threads = len(list(Path("/proc/self/task").iterdir()))
        if threads != 1:
            return f"{threads} threads run in it"
        reasons = (getattr(module, "unfit", lambda: None)() for module in self.modules)
        return next((str(reason) for reason in reasons if reason is not None), None)

    def environ_for(self, environ: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
        """The environment that a process started with `environ` would have after importing the modules: variables that
        an import has set are added, unless `environ` sets them to something else than the fork server had."""
        result = dict(environ)
        for name, value in os.environb.items():
            if value != self.given.get(name) and environ.get(name) == self.given.get(name):
                result[name] = value
        return result

    def settle(self) -> None:
        """Call the preloads' `settle`. For a forked process, once its environment is in place."""
        for module in self.modules:
            getattr(module, "settle", lambda: None)()


def settle_memory() -> None:
    """Prepare the memory of this process to be shared by forks."""
    gc.collect()
    # Frozen objects are left alone by the garbage collector. In a fork it would write to each, and so copy them.
    gc.freeze()
