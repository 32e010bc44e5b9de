"""`python -m dynamo_local.runtime.zygote --namespace N MODULE...`: the nursery. Imports the modules, then forks."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from dynamo_local.runtime import host
from dynamo_local.runtime.processes import die_as_environment_says
from dynamo_local.runtime.zygote import wire
from dynamo_local.runtime.zygote.child import live
from dynamo_local.runtime.zygote.inscription import inscribe
from dynamo_local.runtime.zygote.nursery import Nursery
from dynamo_local.runtime.zygote.preload import Preloaded
from state.paths import StatePaths


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Ends by a signal, or as one of the processes that it has forked."""
    die_as_environment_says()
    arguments = _parse(argv)
    # Before the import, which may add handlers of its own: as in a service that imports by itself.
    host.configure_log(os.environ)
    # Launchers connect from now on, and wait.
    listener = wire.listen(StatePaths.of(arguments.namespace, os.environ).zygote_socket)
    preloaded = Preloaded.load(arguments.modules)
    # What was imported may have cleared the place (setproctitle does), and with it the marks of this process. Not
    # earlier: setproctitle has to find the environment where it was.
    environ = dict(os.environb)
    os.environb.clear()
    os.environb.update(environ)
    inscribe([os.fsencode(part) for part in sys.orig_argv], environ)
    print(f"imported {', '.join(arguments.modules)}", flush=True)
    host.end(live(Nursery(listener, preloaded).run(), preloaded))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m dynamo_local.runtime.zygote", description="Import, then fork.")
    parser.add_argument("--namespace", required=True)
    parser.add_argument("modules", nargs="+", metavar="MODULE")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
