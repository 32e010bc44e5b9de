"""`dynamo key`: orders about API keys, to the server of a namespace or, while none runs, to its files."""

from __future__ import annotations

from dynamo_local.core.endpoints.refusals import error_of
from dynamo_local.core.errors import BusError, SupervisorError
from dynamo_local.core.messages.keys import KeyOrder, KeysAnswer
from dynamo_local.core.subjects import Subjects
from dynamo_local.supervisor.admin.connect import bus_of
from dynamo_local.supervisor.server.reports.report import Report
from state.namespaces import is_running
from state.paths import StatePaths

_ANSWERED_WITHIN_S = 15.0


async def order_key(paths: StatePaths, order: KeyOrder, report: Report) -> KeysAnswer:
    """Have an order carried out. Raises UsageError if it is refused, SupervisorError if the server does not answer,
    StateError if the registry cannot be read or written."""
    if is_running(paths):
        answer = await _ask(paths, order)
    else:
        from dynamo_local.supervisor.keys.start import order_without_server

        answer = await order_without_server(paths, order, report)
    if answer.refused is not None:
        raise error_of(answer.refused)
    return answer


async def _ask(paths: StatePaths, order: KeyOrder) -> KeysAnswer:
    async with bus_of(paths, "key") as bus:
        try:
            subject = Subjects(paths.namespace).keys
            return await bus.ask(subject, order, KeysAnswer, timeout_s=_ANSWERED_WITHIN_S)
        except BusError as error:
            raise SupervisorError(
                f"the server in namespace {paths.namespace} does not answer about keys",
                "it may be starting or stopping: see `dynamo ls`",
            ) from error
