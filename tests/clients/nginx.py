"""nginx, with the configuration of docs/guides/clients.md."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dynamo_local.core.errors import DynamoError
from dynamo_local.process.ancestry import PARENT_PID_ENV

READY_WITHIN_S = 30.0
_HTTP = "http {\n"
_TEMPORARY = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")


class NginxError(DynamoError):
    """nginx does not run."""


def command() -> str:
    """Path of nginx. Raises NginxError."""
    found = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if found is None:
        raise NginxError("nginx is not installed", "on Debian and Ubuntu: apt install nginx")
    return found


def in_folder(configuration: str) -> str:
    """The configuration with all its files in the folder that nginx is started in: any user may run it so."""
    lines = ["access_log off;", *(f"{name}_temp_path {name};" for name in _TEMPORARY)]
    return configuration.replace(_HTTP, _HTTP + "".join(f"    {line}\n" for line in lines), 1)


@contextmanager
def running(configuration: Path, place: str) -> Iterator[None]:
    """nginx, which listens at HOST:PORT."""
    configuration.write_text(in_folder(configuration.read_text()))
    # Started by root, its workers would be another user, who may not enter the folder.
    settings = "daemon off; pid nginx.pid;" + (" user root;" if os.geteuid() == 0 else "")
    words = [command(), "-p", str(configuration.parent), "-c", configuration.name, "-e", "stderr", "-g", settings]
    log = configuration.with_suffix(".log")
    with log.open("wb") as output:
        nginx = subprocess.Popen(
            # Should this process be killed, nginx goes with it.
            [sys.executable, "-m", "dynamo_local.process.guarded", "--", *words],
            env={**os.environ, PARENT_PID_ENV: str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        _await(place, nginx, log)
        yield
    finally:
        nginx.terminate()
        nginx.wait(READY_WITHIN_S)


def _await(place: str, nginx: subprocess.Popen[bytes], log: Path) -> None:
    host, _, port = place.partition(":")
    deadline = time.monotonic() + READY_WITHIN_S
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=1).close()
            return
        except OSError:
            if nginx.poll() is not None or time.monotonic() > deadline:
                raise NginxError("nginx does not answer", f"it said:\n{log.read_text()}") from None
        time.sleep(0.05)
