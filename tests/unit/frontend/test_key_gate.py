"""Keys of the registry at the gate: who gets in, what they see, and what their limits say."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from components.frontend.http.callers import Callers
from components.frontend.http.gate import Administration, HttpGate
from components.frontend.http.models import ModelEntry, ModelTable
from components.frontend.http.usage import UsageMeter
from components.frontend.keys.known import KnownKeys
from components.frontend.keys.ticket import Ticket
from components.frontend.limits.places import Counters, Places
from components.frontend.request_context import caller_of, request_here, tally_of
from dynamo_local.core.http.asgi import Receive, Scope, Send, headers_of
from dynamo_local.core.http.bounds.admission import AdmissionLimits, Refusal
from dynamo_local.core.keys.registry import KeyRegistry, create_key, revoke_key, rotate_key
from dynamo_local.core.keys.values import KeyTerms, digest_of
from dynamo_local.core.ports import Request
from dynamo_local.core.usage.records import UsageRecord
from state.documents import DocumentStore
from state.keys import KEYS
from state.locks import ServerLock
from state.paths import StatePaths
from tests.unit.frontend.asgi_driver import Answer, call, scope


class Submitting:
    """An application that submits a request, answers once it may, and tells how many tokens it has used."""

    def __init__(self) -> None:
        self.prompt, self.max_tokens, self.used = 10, 20, 15
        self.priorities: list[int] = []
        self.keys: list[str] = []
        self.entered = asyncio.Semaphore(0)
        self.open = asyncio.Event()
        self.open.set()

    async def __call__(self, asked: Scope, receive: Receive, send: Send) -> None:
        fields = json.loads((await receive())["body"])
        request = Request("r", range(self.prompt), None, 0.0, fields.get("priority", 0), max_tokens=self.max_tokens)  # type: ignore[arg-type]
        context = request_here()
        request = context.prioritized(request)
        if context.charge(request) is not None:
            await send({"type": "http.response.start", "status": 400, "headers": []})
            await send({"type": "http.response.body", "body": b"what vLLM makes of it"})
            return
        request_here().submit(lambda: self.priorities.append(request.priority))
        self.keys.append(request.key)
        self.entered.release()
        await self.open.wait()
        tally_of(asked).add("p", self.prompt, 0, self.used - self.prompt)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": (caller_of(asked).name or "").encode()})


class Town:
    """A gate before two models, with a registry of keys on disk and a clock."""

    def __init__(self, paths: StatePaths, lock: ServerLock) -> None:
        self.now = 1000.0
        self.wall = 2000.0
        self.registry = KeyRegistry()
        self.store = DocumentStore(KEYS, lock)
        self.apps = {name: Submitting() for name in ("chat", "code")}
        self.entries = [self._entry(name) for name in self.apps]
        self.table = ModelTable(self.entries)
        self.known = KnownKeys(paths, clock=count(0.0, 2.0).__next__)
        self.counters = Counters(Places(paths.limits_file))
        self.records: list[UsageRecord] = []
        self.gate = HttpGate(
            self._common,
            limits=AdmissionLimits(),
            models=self.table,
            is_draining=lambda: False,
            administration=Administration((), self._orders),
            known_keys=self.known,
            admit=partial(Ticket, self.counters, lambda: self.now),
            meter=UsageMeter(self.records.append),
        )
        self.gate._callers = Callers((), (), self.known, lambda: self.wall)

    def _entry(self, name: str) -> ModelEntry:
        async def cards() -> list[dict[str, Any]]:
            return [{"id": name}, {"id": f"{name}-too"}]

        return ModelEntry((name, f"{name}-too"), lambda: None, AdmissionLimits(), self.apps[name], cards=cards)

    async def _common(self, asked: Scope, receive: Receive, send: Send) -> None:
        names = [card["id"] for card in await self.table.cards(request_here().caller.allows)]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(names).encode()})

    async def _orders(self, scope: Scope, body: bytes, by: str) -> tuple[int, bytes] | Refusal:
        return 200, by.encode()

    def create(self, name: str, **terms: Any) -> None:
        """Create a key whose secret is its name."""
        digest = digest_of(name.encode())
        self.write(create_key(self.registry, KeyTerms(name=name, **terms), digest, self.wall))

    def write(self, registry: KeyRegistry) -> None:
        self.registry = registry
        self.store.write(registry)

    async def ask(
        self, key: str = "", model: str | None = "chat", *, given: str | None = None, **fields: Any
    ) -> Answer:
        """`given`: the priority in a header."""
        body = json.dumps({"model": model, "max_tokens": 20} | fields).encode()
        headers = [*bearer(key), *([] if given is None else [("X-Vllm-Priority", given)])]
        return await call(self.gate, scope("/v1/completions", headers=headers), [body])

    async def get(self, path: str, key: str = "", method: str = "GET") -> Answer:
        return await call(self.gate, scope(path, method, bearer(key)), [b"{}"])


def bearer(key: str) -> Sequence[tuple[str, str]]:
    return [("Authorization", f"Bearer {key}")] if key else []


def error_of(answer: Answer) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(answer.body)["error"]
    assert set(content) == {"message", "type", "param", "code"}
    return content


@pytest.fixture
def town(tmp_path: Path) -> Iterator[Town]:
    paths = StatePaths(tmp_path / "state", "dynamo")
    with ServerLock(paths) as lock:
        town = Town(paths, lock)
        yield town
        town.counters.close()


class TestWho:
    async def test_without_keys_everybody_is_answered_and_from_the_first_on_nobody_without(self, town: Town) -> None:
        assert (await town.ask()).status == 200
        assert (await town.ask("guess")).status == 200
        town.create("alice")
        for key in ("", "guess"):
            assert (await town.ask(key)).status == 401
        assert (await town.ask("alice")).body == b"alice"
        assert (await town.get("/live")).status == 200

    async def test_a_key_that_asks_for_all_there_is_keeps_no_other_out(self, town: Town) -> None:
        town.create("flood")
        town.create("late")
        chat = town.apps["chat"]
        chat.open.clear()
        bound = AdmissionLimits().max_requests
        flood = [asyncio.create_task(town.ask("flood", n=16)) for _ in range(bound // 16)]
        for _ in flood:
            await chat.entered.acquire()
        refused = await town.ask("flood")
        assert (refused.status, int(refused.headers["retry-after"]) > 0) == (429, True)
        late = [asyncio.create_task(town.ask("late", n=16)) for _ in range(bound // 32)]
        for _ in late:
            await chat.entered.acquire()
        refused = await town.ask("late")
        assert refused.status == 429
        assert f"{bound // 2} of them with this key, whose share is {bound // 2}" in error_of(refused)["message"]
        assert chat.keys == ["flood"] * len(flood) + ["late"] * len(late)
        chat.open.set()
        assert {answer.status for answer in await asyncio.gather(*flood, *late)} == {200}

    async def test_a_key_that_is_revoked_during_a_request_is_unknown_to_the_next(self, town: Town) -> None:
        town.create("alice", requests_at_once=1)
        town.create("bob")
        town.apps["chat"].open.clear()
        running = asyncio.create_task(town.ask("alice"))
        await town.apps["chat"].entered.acquire()
        town.write(revoke_key(town.registry, "alice"))
        assert (await town.ask("alice")).status == 401
        town.apps["chat"].open.set()
        assert (await running).status == 200
        # A key of the same name afterwards has nothing in flight.
        town.create("alice", requests_at_once=1)
        assert (await town.ask("alice")).status == 200

    async def test_what_is_kept_is_no_later_keys_of_the_name(self, town: Town) -> None:
        town.create("bob")
        town.create("alice", expires_at=town.wall + 10)
        first = town.gate._callers.find(headers_of(scope("/v1/completions", headers=bearer("alice"))))
        assert not isinstance(first, Refusal)
        assert town.gate.caller_for(first.owner) is not None
        town.wall += 10
        assert town.gate.caller_for(first.owner) is None
        town.write(revoke_key(town.registry, "alice"))
        town.create("alice")
        assert town.gate.caller_for(first.owner) is None
        later = town.gate._callers.find(headers_of(scope("/v1/completions", headers=bearer("alice"))))
        assert not isinstance(later, Refusal)
        assert later.owner != first.owner

    async def test_what_is_remembered_of_right_keys_tells_no_secret_and_ends_with_them(self, town: Town) -> None:
        for name in ("alice", "bob"):
            town.create(name, expires_at=town.wall + 60)
        assert [(await town.ask(key)).status for key in ("alice", "bob", "guess") * 2] == [200, 200, 401] * 2
        remembered = town.gate._callers._remembered
        assert len(remembered) == 2
        assert not {b"alice", b"bob", b"guess"} & remembered.keys()
        assert {digest_of(b"alice"), digest_of(b"bob")}.isdisjoint(mark.hex() for mark in remembered)
        town.write(revoke_key(town.registry, "bob"))
        assert [(await town.ask(key)).status for key in ("alice", "bob")] == [200, 401]
        town.wall += 60
        assert error_of(await town.ask("alice"))["message"] == "key alice has expired"

    async def test_only_the_holder_is_told_that_a_key_has_expired(self, town: Town) -> None:
        town.create("alice", expires_at=town.wall + 10)
        assert (await town.ask("alice")).status == 200
        town.wall += 10
        expired = await town.ask("alice")
        assert (expired.status, error_of(expired)["message"]) == (401, "key alice has expired")
        assert error_of(await town.ask("guess"))["message"] == "missing or wrong API key"
        # Clocks may be set back.
        town.wall -= 1
        assert (await town.ask("alice")).status == 200

    async def test_both_secrets_open_during_the_overlap(self, town: Town) -> None:
        town.create("alice")
        town.write(rotate_key(town.registry, "alice", digest_of(b"new"), 60, town.wall))
        assert [(await town.ask(key)).body for key in ("alice", "new")] == [b"alice", b"alice"]
        town.wall += 60
        assert [(await town.ask(key)).status for key in ("alice", "new")] == [401, 200]

    async def test_a_key_of_an_administrator_opens_their_paths(self, town: Town) -> None:
        assert (await town.get("/v1/keys")).status == 403
        town.create("alice")
        assert (await town.get("/v1/keys", "alice")).status == 403
        town.create("boss", admin=True)
        assert [(await town.get("/v1/keys", key)).status for key in ("", "guess", "alice")] == [401, 401, 403]
        assert (await town.get("/v1/keys", "boss")).body == b"boss"

    async def test_a_store_that_cannot_be_read_opens_to_nobody(self, tmp_path: Path) -> None:
        paths = StatePaths(tmp_path, "dynamo")
        with ServerLock(paths) as lock:
            town = Town(paths, lock)
            town.create("alice")
            assert (await town.ask("alice")).status == 200
            whole = paths.keys_file.read_bytes()
            for at in range(0, len(whole), 29):
                for path in (paths.keys_file, paths.keys_copy):
                    path.write_bytes(whole[:at])
                # Who knew the keys goes on; who did not answers nobody.
                assert (await town.ask("alice")).status == 200
                assert (await town.ask("guess")).status == 401
                late = KnownKeys(paths, clock=count(0.0, 2.0).__next__)
                assert late.why_closed
                closed = Callers(known=late).find(headers_of(scope("/v1/completions", headers=bearer("alice"))))
                assert isinstance(closed, Refusal)
                assert closed.status == 503
            paths.keys_file.write_bytes(whole)
            assert isinstance(Callers(known=late, wall_clock=lambda: town.wall).find({}), object)
            assert not late.why_closed
            for path in (paths.keys_file, paths.keys_copy):
                path.unlink()
            assert (await town.ask("guess")).status == 401
            town.counters.close()


class TestWhat:
    async def test_other_endpoints_are_as_if_they_were_not_there(self, town: Town) -> None:
        town.create("alice", endpoints=("chat",))
        town.create("bob")
        refused, absent = await town.ask("alice", "code"), await town.ask("bob", "nothing")
        assert refused.status == absent.status == 404
        assert refused.body.replace(b"`code`", b"`nothing`") == absent.body
        assert refused.headers.keys() == absent.headers.keys()
        assert [(await town.ask("alice", name)).status for name in ("chat", "chat-too", "code-too")] == [200, 200, 404]
        assert (await town.ask("alice", None)).status == 200
        assert error_of(await town.ask("bob", None))["message"].endswith("there are: chat, code")

    async def test_models_are_those_that_the_key_may_use(self, town: Town) -> None:
        town.create("alice", endpoints=("chat",))
        town.create("bob")
        assert json.loads((await town.get("/v1/models", "alice")).body) == ["chat", "chat-too"]
        assert len(json.loads((await town.get("/v1/models", "bob")).body)) == 4

    async def test_a_priority_better_than_the_best_is_refused_and_none_is_the_best(self, town: Town) -> None:
        town.create("alice", best_priority=5)
        refused = await town.ask("alice", priority=4)
        assert (refused.status, error_of(refused)["param"]) == (403, "priority")
        asked: list[dict[str, Any]] = [{}, {"priority": 5}, {"priority": 9}]
        for fields in asked:
            assert (await town.ask("alice", **fields)).status == 200
        assert town.apps["chat"].priorities == [5, 5, 9]

    async def test_the_header_goes_before_the_field_and_the_default_of_the_key_comes_last(self, town: Town) -> None:
        town.create("alice", best_priority=-5, default_priority=-2)
        asked: list[tuple[str | None, dict[str, Any]]] = [(None, {}), ("3", {"priority": -1}), (None, {"priority": 7})]
        for given, fields in asked:
            assert (await town.ask("alice", given=given, **fields)).status == 200
        assert town.apps["chat"].priorities == [-2, 3, 7]
        assert (await town.ask("alice", given="-6")).status == 403
        refused = await town.ask("alice", given="urgent")
        assert (refused.status, error_of(refused)["param"]) == (400, None)
        assert "X-Vllm-Priority" in error_of(refused)["message"]

    async def test_without_keys_a_request_may_only_let_others_go_first(self, town: Town) -> None:
        assert [(await town.ask(priority=priority)).status for priority in (-1, 0, 4)] == [403, 200, 200]
        assert [(await town.ask(given=given)).status for given in ("-1", "0", "4")] == [403, 200, 200]
        assert town.apps["chat"].priorities == [0, 4, 0, 4]


class TestLimits:
    async def test_requests_a_minute(self, town: Town) -> None:
        town.create("alice", requests_per_minute=2)
        first = await town.ask("alice")
        assert first.headers["x-ratelimit-limit-requests"] == "2"
        assert first.headers["x-ratelimit-remaining-requests"] == "1"
        assert first.headers["x-ratelimit-reset-requests"] == "30s"
        assert (await town.ask("alice")).status == 200
        refused = await town.ask("alice")
        assert (refused.status, refused.headers["retry-after"]) == (429, "30")
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        error = error_of(refused)
        assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded")
        assert "try again in 30s" in error["message"]
        assert (await town.get("/v1/models", "alice")).status == 200
        town.now += 30
        assert (await town.ask("alice")).status == 200

    async def test_what_is_not_there_costs_no_request(self, town: Town) -> None:
        town.create("alice", requests_per_minute=2, endpoints=("chat",))
        for model in ("code", "nothing", "code"):
            refused = await town.ask("alice", model)
            assert (refused.status, refused.headers["x-ratelimit-remaining-requests"]) == (404, "2")
        assert [(await town.ask("alice")).status for _ in range(3)] == [200, 200, 429]

    async def test_refusals_of_anthropics_path_have_its_shape(self, town: Town) -> None:
        town.create("alice", requests_per_minute=1)
        body = json.dumps({"model": "chat", "max_tokens": 20}).encode()
        asked = scope("/v1/messages", headers=bearer("alice"))
        assert [(await call(town.gate, asked, [body])).status for _ in range(2)] == [200, 429]
        refused = await call(town.gate, asked, [body])
        assert refused.error["type"] == "rate_limit_error"
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"

    async def test_requests_at_once(self, town: Town) -> None:
        town.create("alice", requests_at_once=1)
        town.apps["chat"].open.clear()
        running = asyncio.create_task(town.ask("alice"))
        await town.apps["chat"].entered.acquire()
        refused = await town.ask("alice")
        assert (refused.status, error_of(refused)["type"], refused.headers["retry-after"]) == (429, "requests", "1")
        town.apps["chat"].open.set()
        assert (await running).status == 200
        assert (await town.ask("alice")).status == 200
        # However a request ends, it is in flight no more.
        assert (await town.ask("alice", model="nothing")).status == 404
        assert (await town.ask("alice", stream=5, n="x")).status == 400
        assert (await town.ask("alice")).status == 200

    async def test_tokens_are_charged_with_what_may_come_and_corrected_by_what_came(self, town: Town) -> None:
        town.create("alice", tokens_per_minute=60)
        town.apps["chat"].open.clear()
        running = [asyncio.create_task(town.ask("alice")) for _ in range(2)]
        for _ in running:
            await town.apps["chat"].entered.acquire()
        refused = await town.ask("alice")
        error = error_of(refused)
        assert (refused.status, error["type"], error["code"]) == (429, "tokens", "rate_limit_exceeded")
        assert "Limit 60, Used 60, Requested 30. Please try again in 30s" in error["message"]
        assert refused.headers["x-ratelimit-remaining-tokens"] == "0"
        town.apps["chat"].open.set()
        assert [answer.headers["x-ratelimit-limit-tokens"] for answer in await asyncio.gather(*running)] == ["60", "60"]
        # 30 of the 60 were used.
        after = await town.ask("alice")
        assert (after.status, after.headers["x-ratelimit-remaining-tokens"]) == (200, "0")
        assert after.headers["x-ratelimit-reset-tokens"] == "1m0s"

    async def test_what_a_limit_refuses_has_asked_no_model(self, town: Town) -> None:
        """Neither at the gate nor when vLLM's server submits it."""
        town.create("alice", tokens_per_minute=60, requests_per_minute=4)
        assert [(await town.ask("alice", n=n)).status for n in (3, 1, 2)] == [429, 200, 429]
        assert [(record.key, record.status, record.prompt + record.output) for record in town.records] == [
            ("alice", 200, 15)
        ]
        assert [(await town.ask("alice")).status for _ in range(2)] == [200, 429]
        assert [record.status for record in town.records] == [200, 200]

    async def test_what_can_never_be_granted_is_not_to_be_tried_again(self, town: Town) -> None:
        town.create("alice", tokens_per_minute=29)
        refused = await town.ask("alice")
        assert (refused.status, refused.headers["x-should-retry"]) == (429, "false")
        assert "retry-after" not in refused.headers
        assert "Request too large" in error_of(refused)["message"]

    async def test_without_a_bound_output_is_charged_when_it_has_come(self, town: Town) -> None:
        town.create("alice", tokens_per_minute=29)
        town.apps["chat"].used = 50
        assert (await town.ask("alice", max_tokens=None)).status == 200
        refused = await town.ask("alice", max_tokens=None)
        assert (refused.status, refused.headers["x-ratelimit-remaining-tokens"]) == (429, "0")
        town.now += 65
        assert (await town.ask("alice", max_tokens=None)).status == 200

    async def test_all_choices_are_charged(self, town: Town) -> None:
        town.create("alice", tokens_per_minute=49)
        assert "Requested 50" in error_of(await town.ask("alice", n=2))["message"]

    async def test_other_keys_are_not_concerned(self, town: Town) -> None:
        town.create("alice", requests_per_minute=1)
        town.create("bob")
        assert [(await town.ask("alice")).status for _ in range(2)] == [200, 429]
        answer = await town.ask("bob")
        assert (answer.status, [name for name in answer.headers if "ratelimit" in name]) == (200, [])
