"""`python -m dynamo_local.process.forkserver --namespace N MODULE...`: the fork server: imports the modules, forks."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from dynamo_local.process import main as service_main
from dynamo_local.process.ancestry import die_as_environment_says
from dynamo_local.process.forkserver import protocol
from dynamo_local.process.forkserver.child import live
from dynamo_local.process.forkserver.preload import Preloaded
from dynamo_local.process.forkserver.process_title import set_process_title
from dynamo_local.process.forkserver.server import ForkServer
from state.paths import StatePaths


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Ends by a signal, or as one of the processes that it has forked."""
    die_as_environment_says()
    arguments = _parse(argv)
    # Before the import, which may add handlers of its own: as in a service that imports by itself.
    service_main.configure_log(os.environ)
    # Launchers connect from now on, and wait.
    listener = protocol.listen(StatePaths.of(arguments.namespace, os.environ).forkserver_socket)
    preloaded = Preloaded.load(arguments.modules)
    # What was imported may have cleared the place (setproctitle does), and with it the marks of this process. Not
    # earlier: setproctitle has to find the environment where it was.
    environ = dict(os.environb)
    os.environb.clear()
    os.environb.update(environ)
    set_process_title([os.fsencode(part) for part in sys.orig_argv], environ)
    print(f"imported {', '.join(arguments.modules)}", flush=True)
    service_main.end(live(ForkServer(listener, preloaded).run(), preloaded))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m dynamo_local.process.forkserver", description="Import, then fork.")
    parser.add_argument("--namespace", required=True)
    parser.add_argument("modules", nargs="+", metavar="MODULE")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
