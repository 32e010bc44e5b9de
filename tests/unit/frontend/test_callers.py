"""The caller of a request: what the gate makes of the key that a request brings, for everything behind it."""

from __future__ import annotations

import pytest

from components.frontend.http.callers import ANYBODY, Caller, Callers
from components.frontend.http.gate import Administration, HttpGate
from components.frontend.http.models import ModelEntry, ModelTable
from components.frontend.request_context import caller_of
from dynamo_local.core.http.asgi import Receive, Scope, Send, headers_of
from dynamo_local.core.http.bounds.admission import AdmissionLimits
from tests.unit.frontend.asgi_driver import call, scope

PLAIN = Caller("api-key-file")
ADMIN = Caller("admin-key-file", admin=True, generates=False)
BOTH = Caller("admin-key-file", admin=True)


class Noting:
    """An application that notes who asks."""

    def __init__(self) -> None:
        self.callers: list[Caller] = []

    async def __call__(self, asked: Scope, receive: Receive, send: Send) -> None:
        self.callers.append(caller_of(asked))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})


def gate_before(app: Noting, api_keys: tuple[str, ...], admin_keys: tuple[str, ...]) -> HttpGate:
    limits = AdmissionLimits()
    entry = ModelEntry(["m"], lambda: None, limits, app)
    return HttpGate(
        app,
        limits=limits,
        models=ModelTable([entry]),
        is_draining=lambda: False,
        api_keys=api_keys,
        administration=Administration(admin_keys),
    )


@pytest.mark.parametrize(
    ("api_keys", "path", "key", "caller"),
    [
        ((), "/v1/completions", "", ANYBODY),
        ((), "/v1/completions", "guess", ANYBODY),
        ((), "/v1/completions", "master", ADMIN),
        (("plain",), "/v1/completions", "plain", PLAIN),
        (("plain", "master"), "/v1/completions", "master", BOTH),
        (("plain",), "/tokenize", "plain", PLAIN),
        (("plain",), "/v1/models", "plain", PLAIN),
        (("plain",), "/metrics", "", ANYBODY),
        (("plain",), "/metrics", "guess", ANYBODY),
        (("plain",), "/metrics", "master", ADMIN),
    ],
)
async def test_everything_behind_the_gate_knows_who_asks(
    api_keys: tuple[str, ...], path: str, key: str, caller: Caller
) -> None:
    app = Noting()
    headers = [("authorization", f"Bearer {key}")] if key else []
    method = "GET" if path in ("/v1/models", "/metrics") else "POST"
    answer = await call(gate_before(app, api_keys, ("master",)), scope(path, method, headers), [b"{}"])
    assert (answer.status, app.callers) == (200, [caller])


async def test_a_client_cannot_say_who_it_is() -> None:
    app = Noting()
    asked: Scope = dict(scope("/v1/completions")) | {"dynamo.caller": BOTH}
    await call(gate_before(app, (), ("master",)), asked, [b"{}"])
    assert app.callers == [ANYBODY]


def test_an_empty_key_is_none() -> None:
    for headers in ([], [("authorization", "Bearer ")], [("authorization", "Basic plain")]):
        assert Callers(["plain"]).find(headers_of(scope("/", headers=headers))) == ANYBODY
