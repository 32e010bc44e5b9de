"""Who gets the header that explains where a request went."""

from __future__ import annotations

import pytest

from components.frontend.http.gate import Administration, HttpGate
from components.frontend.http.models import ModelEntry, ModelTable
from components.frontend.request_context import request_here
from dynamo_local.core.http.asgi import Receive, Scope, Send
from dynamo_local.core.messages.routing import RouteRow
from tests.unit.frontend.asgi_driver import LIMITS, call, scope

ROUTE = RouteRow(request_id="r", frontend="f", tokens=7, age_s=0.0, worker=None)
ASKS = ("X-Dynamo-Explain", "1")
HERE, ELSEWHERE = ("127.0.0.1", 5), ("192.0.2.7", 5)


async def application(asked: Scope, receive: Receive, send: Send) -> None:
    """Begins its answer as a stream does: before the request has a worker."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    if (notes := request_here().notes) is not None:
        notes.note(ROUTE, str)
    await send({"type": "http.response.body", "body": b"served"})


def gate(keys: list[str], admins: list[str]) -> HttpGate:
    entry = ModelEntry(["m"], lambda: None, LIMITS, application)
    return HttpGate(
        application,
        limits=LIMITS,
        models=ModelTable([entry]),
        is_draining=lambda: False,
        api_keys=keys,
        administration=Administration(keys=admins),
    )


@pytest.mark.parametrize(
    ("keys", "admins", "headers", "client", "told"),
    [
        ([], [], [ASKS], HERE, True),
        ([], [], [ASKS], ELSEWHERE, False),
        ([], [], [], HERE, False),
        ([], ["root"], [ASKS], HERE, False),
        ([], ["root"], [ASKS, ("Authorization", "Bearer root")], ELSEWHERE, True),
        (["user"], [], [ASKS, ("Authorization", "Bearer user")], HERE, False),
        (["user", "root"], ["root"], [ASKS, ("Authorization", "Bearer user")], HERE, False),
        (["user", "root"], ["root"], [ASKS, ("Authorization", "Bearer root")], ELSEWHERE, True),
    ],
)
async def test_only_administrators_get_it_or_whoever_is_here_where_there_are_no_keys(
    keys: list[str], admins: list[str], headers: list[tuple[str, str]], client: tuple[str, int], told: bool
) -> None:
    asked = scope("/v1/completions", headers=headers, client=client)
    answer = await call(gate(keys, admins), asked, [b'{"prompt": "a"}'])
    assert (answer.status, answer.body) == (200, b"served")
    assert ("x-dynamo-route" in answer.headers) is told
