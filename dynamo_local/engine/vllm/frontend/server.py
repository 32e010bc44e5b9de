"""The HTTP server in front of the applications of all models.

It is uvicorn directly and not vLLM's `serve_http`, which ends its engine and drops open connections at the first
signal: here a stop lets the streams under way finish. What concerns no single model is answered by an application of
vLLM's without a model: its documentation, its version, the metrics, the list of all models.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from argparse import Namespace
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from dynamo_local.core.errors import EngineError, one_line
from dynamo_local.core.http.asgi import App
from dynamo_local.core.http.bounds.admission import AdmissionLimits
from dynamo_local.core.ports import Progress
from dynamo_local.engine.vllm.arguments import chooses_log
from dynamo_local.engine.vllm.environment import prepare_environment
from dynamo_local.engine.vllm.frontend.application import build_app, parse, with_defaults
from dynamo_local.engine.vllm.frontend.surface import add_routes, root_of, take_outer, under
from dynamo_local.engine.vllm.patches.http_ticks import UvicornStop
from dynamo_local.engine.vllm.patches.table import require

if TYPE_CHECKING:
    from dynamo_local.engine.vllm.frontend.http_connections import Acceptor, Others

_log = logging.getLogger(__name__)

Middleware = Callable[[Any], Any]
"""Wraps an ASGI application."""

Cards = Callable[[], Awaitable[list[dict[str, Any]]]]
"""Returns all models as /v1/models shows them."""


@dataclass(frozen=True)
class _Serving:
    server: Any
    stop: UvicornStop
    task: asyncio.Task[None]
    acceptor: Acceptor
    certificates: asyncio.Task[None] | None


class HttpServer:
    """HTTP server of vLLM's API.

    `config` holds keys of the server's schema; others are ignored. `private_dir`: see environment.py. `gate` is put
    around the application that concerns no single model, and passes on what concerns one; of `limits`, those of
    connections are kept here, for this process and `others` together.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        private_dir: Path,
        gate: Middleware,
        limits: AdmissionLimits,
        cards: Cards,
        others: Others,
    ) -> None:
        self._others = others
        self._config = with_defaults(config)
        self._root = root_of(config.get("root-path"))
        self._private_dir = private_dir
        self._gate = gate
        self._limits = limits
        self._cards = cards
        self._serving: _Serving | None = None

    async def start(self, listener: socket.socket, progress: Progress) -> asyncio.Task[None]:
        """Serve on `listener` (bound, not listening yet).

        Returns the task that serves: it ends after `stop`, or with the error that ended it. Raises EngineError.
        """
        prepare_environment(self._private_dir)
        progress("importing vLLM")
        try:
            args, app = await asyncio.get_running_loop().run_in_executor(None, self._build)
            self._serving = self._serve(args, app, listener)
        except (Exception, SystemExit) as error:
            raise EngineError(f"the OpenAI server cannot start: {one_line(error)}") from error
        await self._until_listening(self._serving)
        return self._serving.task

    async def stop(self, deadline_s: float) -> None:
        """Take no new connection, let the requests under way finish, at most for `deadline_s`."""
        if self._serving is None:
            return
        serving, self._serving = self._serving, None
        serving.stop.stop()
        if serving.certificates is not None:
            serving.certificates.cancel()
        _, late = await asyncio.wait({serving.task}, timeout=deadline_s)
        if late:
            _log.warning("requests were still under way after %g s and are cut off", deadline_s)
            serving.server.force_exit = True
            await asyncio.wait({serving.task}, timeout=2.0)

    def _build(self) -> tuple[Namespace, Any]:
        require("HTTP connections")
        from vllm import envs
        from vllm.logger import configure_logging_from_args
        from vllm.utils.gc_utils import freeze_gc_heap

        args = parse(self._config)
        args.timeout_keep_alive = envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE
        if chooses_log(self._config):
            configure_logging_from_args(args)
        app = build_app(args)
        app.state.openai_serving_models = _AllModels(self._cards)
        # Without an engine, vLLM's answer to /ping is that all is well.
        app.state.engine_client = None
        add_routes(app, self._root)
        # All that was imported, and an application built before, is never garbage.
        freeze_gc_heap()
        return args, app

    def _serve(self, args: Namespace, app: Any, listener: socket.socket) -> _Serving:
        from vllm.entrypoints.launchers.launcher import NoSignalServer

        from dynamo_local.engine.vllm.frontend.http_connections import Certificates, Connections, acceptor_of

        connections = Connections(self._limits, self._others)
        around: Callable[[App], App] = take_outer(app)
        # Around everything: vLLM lets a bootstrap library rebuild the application's own list of middleware.
        config = _uvicorn_config(args, under(self._root, around(self._gate(app))), connections.protocol)
        # Here, so that what is wrong with the files of TLS is an error of the start.
        config.load()
        loop = asyncio.get_running_loop()
        follow = args.enable_ssl_refresh and config.ssl is not None
        certificates = loop.create_task(Certificates(config).follow(), name="files of TLS") if follow else None
        server = NoSignalServer(config)
        stop = UvicornStop(server)
        # It accepts nothing itself: the acceptor does, which it closes.
        task = loop.create_task(server.serve(sockets=[]), name="http")
        return _Serving(server, stop, task, acceptor_of(server, listener, self._others), certificates)

    async def _until_listening(self, serving: _Serving) -> None:
        while not serving.server.started:
            if serving.task.done():
                await serving.task
                raise EngineError("the HTTP server ended while it was starting")
            await asyncio.sleep(0.01)
        serving.server.servers.append(serving.acceptor)
        serving.acceptor.start()


def _uvicorn_config(args: Namespace, app: App, protocol: Any) -> Any:
    """Return uvicorn's configuration for vLLM's arguments, as vLLM's `build_and_serve` makes it."""
    import uvicorn
    from uvicorn.config import LOGGING_CONFIG
    from vllm.entrypoints.launchers.utils.server_utils import get_uvicorn_log_config

    return uvicorn.Config(
        app,
        # uvicorn would guess wrongly: these layers are no coroutine functions.
        interface="asgi3",
        http=protocol,
        ws="none",
        # vLLM's own start and end of an application are of its engine, which this one has not.
        lifespan="off",
        log_config=get_uvicorn_log_config(args) or LOGGING_CONFIG,
        log_level=args.uvicorn_log_level,
        access_log=not args.disable_uvicorn_access_log,
        ssl_keyfile=args.ssl_keyfile,
        ssl_certfile=args.ssl_certfile,
        ssl_ca_certs=args.ssl_ca_certs,
        ssl_cert_reqs=args.ssl_cert_reqs,
        ssl_ciphers=args.ssl_ciphers,
        timeout_keep_alive=args.timeout_keep_alive,
        # Not by $WEB_CONCURRENCY, which must be a number.
        workers=1,
    )


class _AllModels:
    """The models of all applications, as vLLM's route asks for them."""

    def __init__(self, cards: Cards) -> None:
        self._cards = cards

    async def show_available_models(self) -> Any:
        """Return an object with the two things that routes make use of."""
        cards = await self._cards()
        listed = {"object": "list", "data": cards}
        data = [SimpleNamespace(id=card["id"], model_dump=lambda card=card: card) for card in cards]
        return SimpleNamespace(data=data, model_dump=lambda: listed)
