"""Revisions of endpoints in one frontend: a board written by hand, mockers in each revision's scope, a gate to ask."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from components.frontend.endpoints.model import Application
from components.frontend.endpoints.revision import FrontendIdentity
from components.frontend.endpoints.served_models import BoardWatch, ServedModels
from components.frontend.http.gate import HttpGate
from dynamo_local.bus.nats import Bus
from dynamo_local.bus.presence import FleetWatch
from dynamo_local.control.operations import WAKE_ENDPOINT, Call
from dynamo_local.core.endpoints.spec import EndpointSpec
from dynamo_local.core.errors import DynamoError, EngineError
from dynamo_local.core.http.asgi import Receive, Scope, Send
from dynamo_local.core.http.bounds.admission import AdmissionLimits
from dynamo_local.core.messages.admin import RequestsAnswer, RequestsQuestion
from dynamo_local.core.messages.endpoints import (
    Board,
    BoardRevision,
    EndpointState,
    EndpointStatus,
    EndpointView,
    ServedAdapter,
)
from dynamo_local.core.messages.presence import Presence
from dynamo_local.core.names import Watcher, check_endpoint, parse_revision
from dynamo_local.core.ports import Dispatcher, Progress, Request
from dynamo_local.core.request.recovery import Fidelity, Survival
from dynamo_local.core.subjects import Subjects
from dynamo_local.engine.mocker.engine import MockerEngine
from dynamo_local.engine.mocker.tokens import continuation
from dynamo_local.sdk.config.resolved import ResolvedGraph, ResolvedService
from dynamo_local.supervisor.control.api import ControlApi, ControlSocket
from dynamo_local.tasks import TaskGuard, unless
from state.files import make_sockets, remove_run_directory, replace_file
from state.paths import StatePaths
from tests.integration.conftest import Connect
from tests.integration.fleet_of_fakes import until
from tests.integration.frontend.mocked_answers import FAST, asking_for
from tests.integration.workers.worker_parts import Worker, context_of
from tests.unit.frontend.asgi_driver import Answer, Backend, call, disconnected, scope

_numbers = itertools.count(1)


@dataclass
class EchoApplication:
    """An application whose prompts and answers are lists of token ids. `may_start`: until then it is being built;
    `may_serve`: until then it takes over no adapters."""

    config: Mapping[str, Any]
    dispatcher: Dispatcher
    may_start: asyncio.Event
    closed: bool = False
    paths: frozenset[str] = frozenset({"/v1/completions"})
    vocabulary: int | None = None
    adapters: Mapping[str, str] = field(default_factory=dict)
    may_serve: asyncio.Event = field(default_factory=asyncio.Event)
    _answers: dict[str, asyncio.Queue[Any]] = field(default_factory=dict)
    _reading: asyncio.Task[None] | None = None

    async def start(self, progress: Progress) -> None:
        self.may_serve.set()
        progress("loading the tokenizer")
        await self.may_start.wait()
        if self.config.get("model") == "broken":
            raise EngineError("no such model", "choose another")
        self._reading = asyncio.create_task(self._read())

    async def close(self) -> None:
        self.closed = True
        if self._reading is not None:
            self._reading.cancel()

    async def cards(self) -> list[dict[str, Any]]:
        return [{"id": name} for name in (*self.config["served-model-name"], *self.adapters)]

    async def serve_adapters(self, adapters: Collection[ServedAdapter]) -> None:
        await self.may_serve.wait()
        self.adapters = {adapter.name: adapter.path for adapter in adapters}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        fields = json.loads((await receive())["body"])
        if fields["max_tokens"] < 1:
            await send({"type": "http.response.start", "status": 400, "headers": []})
            await send({"type": "http.response.body", "body": b"max_tokens must be at least 1"})
            return
        await unless(disconnected(receive), self._answer(fields, send))

    async def _answer(self, fields: Mapping[str, Any], send: Send) -> None:
        name = f"r{next(_numbers)}"
        answers = self._answers[name] = asyncio.Queue()
        tokens = fields["max_tokens"]
        sampling, survival = asking_for(tokens), Survival(Fidelity.EXACT)
        request = Request(name, fields["prompt"], sampling, arrival_time=1.0, max_tokens=tokens, survival=survival)
        await self.dispatcher.submit(request)
        found: list[int] = []
        while (delta := await answers.get()).finish is None:
            found += delta.token_ids
        del self._answers[name]
        status = 200 if delta.finish == "length" else 503
        body = json.dumps({"tokens": found + delta.token_ids, "error": delta.error}).encode()
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": body})

    async def _read(self) -> None:
        while True:
            for delta in (await self.dispatcher.outputs()).deltas:
                self._answers[delta.request_id].put_nowait(delta)


class ImitatedServer:
    """Takes orders to wake endpoints, whose names are in `orders`. `refuses`: all of them. `under_way`: not answered
    yet."""

    def __init__(self, paths: StatePaths) -> None:
        self._paths = paths
        self.orders: list[str] = []
        self.refuses: DynamoError | None = None
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.under_way = self.most_under_way = 0

    async def start(self, ending: AsyncExitStack) -> None:
        api = ControlApi()
        api.take({WAKE_ENDPOINT: self._wake})
        ending.callback(remove_run_directory, self._paths)
        socket = ControlSocket(api, make_sockets(self._paths).control)
        ending.push_async_callback(socket.close, asyncio.create_task(socket.run()))

    async def _wake(self, call: Call) -> dict[str, Any]:
        assert call.flag("asked")
        self.orders.append(call.name(check_endpoint))
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        await self.may_answer.wait()
        self.under_way -= 1
        if self.refuses is not None:
            raise self.refuses
        return {}


class EndpointScene:
    """A frontend without a model of its own, and what the server would have told it."""

    def __init__(
        self,
        connect: Connect,
        bus: Bus,
        subjects: Subjects,
        folder: Path,
        ending: AsyncExitStack,
        hold_timeout_s: float = 0,
    ) -> None:
        self._connect, self._bus, self._folder, self._ending = connect, bus, folder, ending
        self.subjects = subjects
        self.paths = StatePaths(folder, subjects.namespace)
        self.paths.graph_of("a@1").parent.mkdir(parents=True)
        self.board = Board()
        self.draining = False
        self.hold_timeout_s = hold_timeout_s
        self.may_start: dict[str, asyncio.Event] = {}
        self.applications: dict[str, EchoApplication] = {}
        self.tasks = TaskGuard()
        identity = FrontendIdentity(Watcher(subjects.namespace, "Frontend"), "f1", bus, folder, routed=False)
        self.limits = AdmissionLimits(hold_timeout_s=hold_timeout_s)
        self.served = ServedModels(identity, self.paths, self.tasks, self._make, self.limits)
        self.watch = BoardWatch(self.paths.board_file, bus, subjects, self.served.follow, poll_s=60)
        self.backend = Backend()
        self.gate = HttpGate(
            self.backend, limits=self.limits, models=self.served.table, is_draining=lambda: self.draining
        )

    def _make(self, config: Mapping[str, Any], _: Path, dispatcher: Dispatcher) -> Application:
        revision = str(config["revision-of-the-test"])
        made = EchoApplication(config, dispatcher, self.may_start[revision])
        self.applications[revision] = made
        return made

    def write_graph(self, revision: str, *, model: str = "m", may_start: bool = True) -> None:
        """Write the graph of a revision, whose application starts at once, or when it may."""
        self.may_start[revision] = asyncio.Event()
        if may_start:
            self.may_start[revision].set()
        config = {"model": model, "revision-of-the-test": revision, "hold-timeout-s": self.hold_timeout_s}
        services = tuple(
            ResolvedService(name, f"components:{name}", role, 1, 0, 0.0, {}, settings, ())
            for name, role, settings in (("VllmWorker", "aggregated", {}), ("Frontend", "frontend", config))
        )
        graph = ResolvedGraph("components:Frontend", self.subjects.namespace, services)
        self.paths.graph_of(revision).write_bytes(graph.to_json())

    async def show(self, *listed: BoardRevision, endpoints: Sequence[EndpointView] = ()) -> None:
        """Write the board and tell of it, as the server does; returns when the frontend has seen it."""
        self.board = Board(self.board.number + 1, listed, tuple(endpoints))
        replace_file(self.paths.board_file, msgspec.json.encode(self.board), durable=False)
        await self._bus.publish(self.subjects.board, b"")
        await until(lambda: self.served.board.number == self.board.number)

    async def mocker(self, revision: str, lease: str, vocabulary: int) -> Worker:
        """Start a worker whose tokens tell its revision, by the size of its vocabulary."""
        settings = replace(FAST, mocker_vocab_size=vocabulary)
        subjects = Subjects(self.subjects.namespace, revision)
        context = context_of(await self._connect(), subjects, "VllmWorker", "aggregated", lease)
        worker = Worker(context, MockerEngine(settings, self._folder))
        await worker.start()

        async def end() -> None:
            await worker.close()
            await worker.engine.close(1.0)

        self._ending.push_async_callback(end)
        return worker

    async def watch_frontend(self, revision: str) -> FleetWatch:
        """Follow what the frontend announces in a revision's scope."""
        fleet = FleetWatch(await self._connect(), Subjects(self.subjects.namespace, revision))
        await fleet.start()
        return fleet

    async def ask(
        self,
        model: str | None,
        prompt: Sequence[int] = (1, 2, 3),
        tokens: int = 8,
        *,
        stream: bool = False,
        **driven: Any,
    ) -> Answer:
        """Ask for tokens through the gate. `driven`: as `call` takes it."""
        fields: dict[str, Any] = {"prompt": list(prompt), "max_tokens": tokens, "stream": stream}
        if model is not None:
            fields["model"] = model
        return await call(self.gate, scope("/v1/completions"), [json.dumps(fields).encode()], **driven)

    async def tokens(self, model: str | None, prompt: Sequence[int], number: int = 8) -> list[int]:
        """Ask for tokens that are to come."""
        answer = await self.ask(model, prompt, number)
        assert answer.status == 200, answer.body
        found: list[int] = json.loads(answer.body)["tokens"]
        return found

    async def held(self, model: str, number: int) -> None:
        """Wait until so many requests are held for a model."""
        await until(lambda: self.served.table.held().get(model) == number)

    async def server(self) -> ImitatedServer:
        """Begin to answer orders as the server does."""
        server = ImitatedServer(self.paths)
        await server.start(self._ending)
        return server

    async def requests(self, revision: str, limit: int) -> RequestsAnswer:
        """Ask the frontend for its requests, as an operator does."""
        subject = Subjects(self.subjects.namespace, revision).requests("f1")
        return await (await self._connect()).ask(subject, RequestsQuestion(limit), RequestsAnswer, timeout_s=10)

    async def health(self) -> Answer:
        return await call(self.gate, scope("/health", "GET"))


@asynccontextmanager
async def endpoint_scene(
    connect: Connect, subjects: Subjects, folder: Path, *, hold_timeout_s: float = 0
) -> AsyncIterator[EndpointScene]:
    async with AsyncExitStack() as ending:
        scene = EndpointScene(connect, await connect(), subjects, folder, ending, hold_timeout_s)
        await scene.watch.start()
        scene.tasks.spawn("board", scene.watch.run())
        yield scene
        for waiting in scene.may_start.values():
            waiting.set()
        await scene.served.close()
        failed = asyncio.create_task(scene.tasks.failed())
        await asyncio.sleep(0)
        assert not failed.done(), failed.exception()
        failed.cancel()
        assert await scene.tasks.close() == []


def listed(
    revision: str, *, takes: bool, names: tuple[str, ...] | None = None, adapters: Mapping[str, str] | None = None
) -> BoardRevision:
    served = tuple(ServedAdapter(name, path) for name, path in (adapters or {}).items())
    return BoardRevision(revision, takes, names or (parse_revision(revision).endpoint,), served)


def view(
    name: str, state: EndpointState, reason: str = "", *, min_workers: int = 1, adapter_of: str | None = None
) -> EndpointView:
    spec = EndpointSpec(name=name, model="m", min_workers=min_workers, adapter_of=adapter_of)
    return EndpointView(spec, EndpointStatus(state, reason), 1.0, 1.0, (name,))


def right(prompt: Sequence[int], tokens: int, vocabulary: int) -> list[int]:
    """What a mocker with this vocabulary answers."""
    return continuation(prompt, tokens, vocabulary)


def announced(fleet: FleetWatch) -> Presence | None:
    """What the frontend last announced in the scope that is followed."""
    return next((one for one in fleet.view.members() if one.role == "frontend"), None)


def state_of(fleet: FleetWatch) -> tuple[str, int | None] | None:
    """State and requests in flight, as the frontend announced them."""
    found = announced(fleet)
    return None if found is None else (found.state, found.counts.in_flight if found.counts is not None else None)
