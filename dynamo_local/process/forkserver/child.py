"""A forked process becomes the one that was ordered."""

from __future__ import annotations

import os
import signal
import sys

from dynamo_local.process import main
from dynamo_local.process.death_pipe import die_with_writer
from dynamo_local.process.forkserver import exit_pipe, protocol
from dynamo_local.process.forkserver.preload import Preloaded
from dynamo_local.process.forkserver.process_title import set_process_title
from dynamo_local.process.forkserver.server import Birth


def live(birth: Birth, preloaded: Preloaded) -> int:
    """The whole life of the service. Returns the exit status."""
    *stdio, collar, speech = birth.descriptors
    for target, descriptor in enumerate(stdio):
        os.dup2(descriptor, target)
    protocol.close(stdio)
    # Leader of a group of its own, as circus' own children are: what it forks is found by its pid. Its session is the
    # one of all of them (supervisor/circus/circusd.py).
    os.setpgid(0, 0)
    die_with_writer(collar)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    environ = preloaded.environ_for(birth.order.environ)
    os.environb.clear()
    os.environb.update(environ)
    arguments = ("-m", main.__name__, *birth.order.argv)
    set_process_title([os.fsencode(part) for part in (sys.executable, *arguments)], environ)
    sys.argv = [str(main.__file__), *birth.order.argv]
    preloaded.settle()
    code = main.run(birth.order.argv)
    exit_pipe.write_exit_code(speech, code)
    return code
