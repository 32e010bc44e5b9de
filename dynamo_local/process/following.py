"""Stands for another process that is not a child: passes signals on to it, and ends as it ends."""

from __future__ import annotations

import os
import resource
import select
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def follow(pidfd: int, begun: Callable[[], object] = lambda: None) -> None:
    """Pass signals on to the process until it has ended. `begun` is called as soon as signals are passed on."""
    arrived, wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(wake)
    for passed_on in _PASSED_ON:
        signal.signal(passed_on, lambda *_: None)
    begun()
    poller = select.poll()
    poller.register(arrived, select.POLLIN)
    poller.register(pidfd, select.POLLIN)
    while all(descriptor != pidfd for descriptor, _ in poller.poll()):
        for number in os.read(arrived, 64):
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, number)


def end_like(code: int) -> NoReturn:
    """End with that exit code; a negative one is the signal to end by."""
    if code >= 0:
        sys.exit(code)
    # The other process has left a core file already, if it left any.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError, ValueError):
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    sys.exit(128 - code)
