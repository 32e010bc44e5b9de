"""`python -m dynamo_local.process.forkserver --namespace N MODULE...`: the fork server. Imports the modules, then
forks. If an earlier fork server has left a spare, it has that forked instead, and ends as the fork ends."""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Sequence
from typing import NoReturn

from dynamo_local.process import main as service_main
from dynamo_local.process.ancestry import DEATH_PIPE_ENV, die_as_environment_says
from dynamo_local.process.following import end_like
from dynamo_local.process.forkserver import protocol
from dynamo_local.process.forkserver.child import run_child, set_process_title, take_over
from dynamo_local.process.forkserver.launcher import Fork, ask_if_there
from dynamo_local.process.forkserver.preload import Preloaded
from dynamo_local.process.forkserver.prepared.orders import PreparedOrder
from dynamo_local.process.forkserver.prepared.process import run_prepared
from dynamo_local.process.forkserver.server import AcceptedOrder, ForkServer
from dynamo_local.process.forkserver.spare import SpareOrder, become_spare
from state.paths import StatePaths

MODULE = "dynamo_local.process.forkserver"


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Import and fork until a signal ends this process. Each forked process ends here as well, as its service ends."""
    death_pipe = os.environ.get(DEATH_PIPE_ENV)
    die_as_environment_says()
    arguments = parse(argv)
    # Before the import, which may add log handlers of its own: the order of a service that imports by itself.
    service_main.configure_log(os.environ)
    paths = StatePaths.of(arguments.namespace, os.environ)
    another = _ask_another(paths)
    if another is not None:
        end_like(another.follow())
    # Before the import: launchers can connect from now on, and wait.
    listener = protocol.listen(str(paths.forkserver_socket))
    preloaded = Preloaded.load(arguments.modules)
    # An import may overwrite the memory that /proc shows as this process's environment (setproctitle does), so it is
    # written again. Not earlier: setproctitle must find the environment in its original place.
    environ = dict(os.environb)
    os.environb.clear()
    os.environb.update(environ)
    set_process_title([os.fsencode(part) for part in sys.orig_argv], environ)
    print(f"imported {', '.join(arguments.modules)}", flush=True)
    serve(listener, preloaded, paths, death_pipe)


def _ask_another(paths: StatePaths) -> Fork | None:
    """Have the spare forked, or a process of tests that has imported already. None if there is neither."""
    arguments = tuple(sys.argv[1:])
    spare = ask_if_there(str(paths.spare_socket), arguments, "no fork of the spare ({}); it is imported anew")
    if spare is not None:
        return spare
    imported = os.environ.get(protocol.IMPORTED_ENV, "")
    return ask_if_there(imported, arguments, f"no fork from ${protocol.IMPORTED_ENV} ({{}}); it is imported anew")


def serve(
    listener: socket.socket, preloaded: Preloaded, paths: StatePaths, death_pipe: str | None, spare: int | None = None
) -> NoReturn:
    """Fork for ever, for a server's launchers. `death_pipe`: address of the server's; without one there is no spare.
    `spare`: the pid of the one there is."""
    pid = os.getpid()
    server = ForkServer(listener, preloaded)
    server.prepare(paths)
    if death_pipe is not None:
        server.keep_spare(spare)
    ordered = server.run()
    if isinstance(ordered, SpareOrder):
        assert death_pipe is not None, "a spare is kept of servers only"
        become_spare(death_pipe)
        spare = os.getpid()
        accepted = ForkServer(protocol.listen(str(paths.spare_socket)), preloaded).run()
        assert isinstance(accepted, AcceptedOrder)
        take_over(accepted, preloaded, MODULE)
        print(f"forked from {spare}, the spare of an earlier fork server", flush=True)
        serve(protocol.listen(str(paths.forkserver_socket)), preloaded, paths, death_pipe, spare)
    if isinstance(ordered, PreparedOrder):
        ordered = run_prepared(ordered, pid, preloaded, paths)
    service_main.end(run_child(ordered, preloaded))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Namespace and modules of a fork server's command line."""
    parser = argparse.ArgumentParser(prog="python -m dynamo_local.process.forkserver", description="Import, then fork.")
    parser.add_argument("--namespace", required=True)
    parser.add_argument("modules", nargs="+", metavar="MODULE")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
