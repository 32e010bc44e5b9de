"""Has a server replace the token of its NATS, and waits until it has."""

from __future__ import annotations

import asyncio
import secrets

from dynamo_local.core.errors import BusError, SupervisorError
from dynamo_local.core.messages.rotation import RotateToken, RotationAnswer
from dynamo_local.core.subjects import Subjects
from dynamo_local.supervisor.admin.connect import bus_of
from state.paths import StatePaths

_DEADLINE_S = 60.0
_ANSWER_S = 2.0
_LOOK_EVERY_S = 0.2


async def rotate_token(paths: StatePaths) -> RotationAnswer:
    """Replace the token of the namespace's NATS. Raises SupervisorError if the server refuses or does not finish, and
    as `bus_of`."""
    order = RotateToken(secrets.token_hex(8))
    try:
        async with asyncio.timeout(_DEADLINE_S), bus_of(paths, "rotate-token") as bus:
            while True:
                try:
                    subject = Subjects(paths.namespace).token_orders
                    answer = await bus.ask(subject, order, RotationAnswer, timeout_s=_ANSWER_S)
                except BusError:
                    # This connection, or the server's, may be changing to the new token.
                    answer = RotationAnswer()
                if answer.refused:
                    raise SupervisorError(answer.refused, answer.remedy)
                if answer.finished:
                    return answer
                await asyncio.sleep(_LOOK_EVERY_S)
    except TimeoutError as error:
        raise SupervisorError(
            f"the server has not replaced the token within {_DEADLINE_S:g} s", "see `dynamo events --kind secret`"
        ) from error
