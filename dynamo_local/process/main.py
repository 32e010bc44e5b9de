"""`python -m dynamo_local.process.main --namespace N --service S`: the process of a service.

Exit status: 0 when told to end (SIGTERM, SIGINT, lease revoked), even while starting; that of the error when the
service cannot start; 1 when it fails later or does not shut down well. The cause of a failure is the line on stderr
that starts with `error:`.
"""

from __future__ import annotations

import argparse
import asyncio
import atexit
import logging
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import NoReturn

from dynamo_local.core.errors import DynamoError
from dynamo_local.core.names import LOG_ENV
from dynamo_local.process.ancestry import die_as_environment_says
from dynamo_local.process.service import Startup, read_startup, report, run_service

_EXIT_DEADLINE_S = 5.0
"""For exit handlers, after the service has ended. A thread that still loads a model must not delay the exit."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one service until it ends. Returns the exit status."""
    try:
        die_as_environment_says()
    except DynamoError as error:
        report(error)
        return error.exit_code
    return run(argv)


def run(argv: Sequence[str] | None = None) -> int:
    """`main` without `die_as_environment_says`, for a fork, which its launcher ties to itself (forkserver/child.py)."""
    try:
        arguments = _parse(argv)
        configure_log(os.environ)
        startup = read_startup(arguments.namespace, arguments.service, os.environ)
    except DynamoError as error:
        report(error)
        return error.exit_code
    with asyncio.Runner() as runner:
        code = runner.run(_run(startup))
        _exit_in_any_case(code)
    return code


def end(code: int) -> NoReturn:
    """Run exit handlers and end this process with that status, without finalizing the interpreter.

    Finalizing takes a second where vLLM is imported, and the kernel frees everything anyway.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


async def _run(startup: Startup) -> int:
    told_to_end = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, told_to_end.set)
    return await run_service(startup, told_to_end)


def _exit_in_any_case(code: int) -> None:
    timer = threading.Timer(_EXIT_DEADLINE_S, os._exit, (code,))
    timer.daemon = True
    timer.start()


def configure_log(environ: Mapping[str, str]) -> None:
    """Log to stderr. A second call changes the level only."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    level = environ.get(LOG_ENV, "info").upper()
    logging.getLogger().setLevel(logging.getLevelNamesMapping().get(level, logging.INFO))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m dynamo_local.process.main", description="Run one service.")
    parser.add_argument("--namespace", required=True)
    parser.add_argument("--service", required=True)
    return parser.parse_args(argv)


if __name__ == "__main__":
    end(main())
