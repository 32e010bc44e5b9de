"""The life of a forked process: it takes over what the launcher has sent, and runs the service, or is a fork server."""

from __future__ import annotations

import os
import signal
import sys

from dynamo_local.process import main
from dynamo_local.process.death_pipe import die_with_writer
from dynamo_local.process.forkserver import exit_pipe, protocol
from dynamo_local.process.forkserver.preload import Preloaded
from dynamo_local.process.forkserver.process_title import set_process_title
from dynamo_local.process.forkserver.server import AcceptedOrder


def run_child(accepted: AcceptedOrder, preloaded: Preloaded) -> int:
    """Run the service that was ordered, in this forked process. Returns the exit status."""
    exit_code_pipe = take_over(accepted, preloaded, main.__name__)
    sys.argv = [str(main.__file__), *accepted.order.argv]
    preloaded.settle()
    code = main.run(accepted.order.argv)
    exit_pipe.write_exit_code(exit_code_pipe, code)
    return code


def take_over(accepted: AcceptedOrder, preloaded: Preloaded, module: str) -> int:
    """Have this forked process be what was ordered, a run of that module: with its output, its environment and its
    title, and tied to its launcher. Returns the descriptor for its exit code."""
    *stdio, death_pipe, exit_code_pipe = accepted.descriptors
    for target, descriptor in enumerate(stdio):
        os.dup2(descriptor, target)
    protocol.close(stdio)
    # Lead a group, as circus's own children do, so that children are found by this pid (process/groups.py). The session
    # stays the one of all processes (supervisor/circus/circusd.py).
    os.setpgid(0, 0)
    die_with_writer(death_pipe)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    environ = preloaded.environ_for(accepted.order.environ)
    os.environb.clear()
    os.environb.update(environ)
    arguments = ("-m", module, *accepted.order.argv)
    set_process_title([os.fsencode(part) for part in (sys.executable, *arguments)], environ)
    return exit_code_pipe
