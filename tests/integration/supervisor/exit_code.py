"""The exit code of a server of the tests, and its error on standard error, as `dynamo serve` has them."""

from __future__ import annotations

import sys

from dynamo_local.cli.commands import INTERRUPTED
from dynamo_local.cli.output import Console
from dynamo_local.core.errors import DynamoError
from dynamo_local.supervisor.server.controlled import Controller
from dynamo_local.supervisor.server.launch.plan import Launch
from dynamo_local.supervisor.server.serve import serve
from dynamo_local.supervisor.server.settings import ServerSettings


def exit_code_of_serving(launch: Launch, settings: ServerSettings, controller: Controller | None = None) -> int:
    """Serve until the server ends, and return its exit code."""
    try:
        serve(launch, settings, Console(), controller)
    except DynamoError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0
