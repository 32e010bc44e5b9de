"""`python -m dynamo_local.process.forkserver --namespace N MODULE...`: the fork server. Imports the modules, then
forks."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from dynamo_local.process import main as service_main
from dynamo_local.process.ancestry import die_as_environment_says
from dynamo_local.process.forkserver import protocol
from dynamo_local.process.forkserver.child import run_child
from dynamo_local.process.forkserver.preload import Preloaded
from dynamo_local.process.forkserver.prepared.orders import PreparedOrder
from dynamo_local.process.forkserver.prepared.process import run_prepared
from dynamo_local.process.forkserver.process_title import set_process_title
from dynamo_local.process.forkserver.server import ForkServer
from state.paths import StatePaths


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Import and fork until a signal ends this process. Each forked process ends here as well, as its service ends."""
    die_as_environment_says()
    arguments = _parse(argv)
    # Before the import, which may add log handlers of its own: the order of a service that imports by itself.
    service_main.configure_log(os.environ)
    # Before the import: launchers can connect from now on, and wait.
    paths = StatePaths.of(arguments.namespace, os.environ)
    listener = protocol.listen(str(paths.forkserver_socket))
    preloaded = Preloaded.load(arguments.modules)
    # An import may overwrite the memory that /proc shows as this process's environment (setproctitle does), so it is
    # written again. Not earlier: setproctitle must find the environment in its original place.
    environ = dict(os.environb)
    os.environb.clear()
    os.environb.update(environ)
    set_process_title([os.fsencode(part) for part in sys.orig_argv], environ)
    print(f"imported {', '.join(arguments.modules)}", flush=True)
    pid = os.getpid()
    server = ForkServer(listener, preloaded)
    server.prepare(paths)
    ordered = server.run()
    if isinstance(ordered, PreparedOrder):
        ordered = run_prepared(ordered, pid, preloaded, paths)
    service_main.end(run_child(ordered, preloaded))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m dynamo_local.process.forkserver", description="Import, then fork.")
    parser.add_argument("--namespace", required=True)
    parser.add_argument("modules", nargs="+", metavar="MODULE")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
