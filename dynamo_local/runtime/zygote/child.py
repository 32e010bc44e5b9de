"""A forked process becomes the one that was ordered."""

from __future__ import annotations

import os
import signal
import sys

from dynamo_local.runtime import host
from dynamo_local.runtime.death_pipe import die_with_writer
from dynamo_local.runtime.zygote import leash, wire
from dynamo_local.runtime.zygote.inscription import inscribe
from dynamo_local.runtime.zygote.nursery import Birth
from dynamo_local.runtime.zygote.preload import Preloaded


def live(birth: Birth, preloaded: Preloaded) -> int:
    """The whole life of the service. Returns the exit status."""
    *stdio, collar, speech = birth.descriptors
    for target, descriptor in enumerate(stdio):
        os.dup2(descriptor, target)
    wire.close(stdio)
    # Leader of a group of its own, as circus' own children are: what it forks is found by its pid. Its session is the
    # one of all of them (supervisor/circusd.py).
    os.setpgid(0, 0)
    die_with_writer(collar)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    environ = preloaded.environ_for(birth.order.environ)
    os.environb.clear()
    os.environb.update(environ)
    arguments = ("-m", host.__name__, *birth.order.argv)
    inscribe([os.fsencode(part) for part in (sys.executable, *arguments)], environ)
    sys.argv = [str(host.__file__), *birth.order.argv]
    preloaded.settle()
    code = host.run(birth.order.argv)
    leash.say(speech, code)
    return code
