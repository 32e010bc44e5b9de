"""vLLM's OpenAI server in front of a dispatcher.

The application is vLLM's own (`build_app`, `init_app_state`). It is served by uvicorn directly and not by vLLM's
`serve_http`, which ends its engine and drops open connections at the first signal: here a stop lets the streams
under way finish.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamo_local.core.errors import ConfigError, EngineError
from dynamo_local.core.http.admission import AdmissionLimits
from dynamo_local.core.http.bounds import RequestBounds
from dynamo_local.core.ports import Dispatcher, Progress
from dynamo_local.engine.vllm.arguments import adapter_schema, engine_schema, server_schema, to_argv, unsplit
from dynamo_local.engine.vllm.environment import prepare_environment
from dynamo_local.engine.vllm.frontend.outer import take_outer
from dynamo_local.engine.vllm.frontend.routes import add_routes
from dynamo_local.engine.vllm.patches.http_ticks import Ending
from dynamo_local.engine.vllm.patches.table import require
from dynamo_local.sdk.config.schema import combine

_log = logging.getLogger(__name__)

Middleware = Callable[[Any], Any]
"""Wraps an ASGI application."""

KEEP_ALIVE_ENV = "VLLM_HTTP_TIMEOUT_KEEP_ALIVE"
"""How long the frontend keeps an idle connection open, in s. By default 5."""

_DEFAULTS = {
    "disable-uvicorn-access-log": True,
    "uvicorn-log-level": "warning",
}


@dataclass(frozen=True)
class _Serving:
    llm: Any
    server: Any
    ending: Ending
    task: asyncio.Task[None]


class OpenAIServer:
    """One HTTP server.

    `config` holds keys of the engine's and the server's schema; others are ignored. `private_dir`: see
    environment.py. `gate` is put around vLLM's application; of `limits`, those of connections are kept here.
    """

    def __init__(
        self,
        config: dict[str, Any],
        private_dir: Path,
        dispatcher: Dispatcher,
        gate: Middleware,
        limits: AdmissionLimits,
    ) -> None:
        # The page loads what it needs from here, and not from elsewhere.
        documented = not config.get("disable-fastapi-docs", False)
        self._config = {**_DEFAULTS, "enable-offline-docs": documented, **config}
        self._limits = limits
        self._private_dir = private_dir
        self._dispatcher = dispatcher
        self._gate = gate
        self._serving: _Serving | None = None

    async def start(self, listener: socket.socket, progress: Progress) -> asyncio.Task[None]:
        """Load the tokenizer, then serve on `listener` (bound, not listening yet).

        Returns the task that serves: it ends after `stop`, or with the error that ended it. Raises EngineError.
        """
        loop = asyncio.get_running_loop()
        prepare_environment(self._private_dir)
        progress("importing vLLM")
        try:
            args, llm = await loop.run_in_executor(None, self._build, progress)
            app = await self._application(args, llm)
        except (Exception, SystemExit) as error:
            text = " ".join(str(error).split())[:400] or type(error).__name__
            raise EngineError(f"the OpenAI server cannot start: {text}") from error
        self._serving = self._serve(args, llm, app, listener)
        await self._until_listening(self._serving)
        return self._serving.task

    async def stop(self, deadline_s: float) -> None:
        """Take no new connection, let the requests under way finish, at most for `deadline_s`."""
        if self._serving is None:
            return
        serving, self._serving = self._serving, None
        serving.ending.tell()
        _, late = await asyncio.wait({serving.task}, timeout=deadline_s)
        if late:
            _log.warning("requests were still under way after %g s and are cut off", deadline_s)
            serving.server.force_exit = True
            await asyncio.wait({serving.task}, timeout=2.0)
        await asyncio.get_running_loop().run_in_executor(None, serving.llm.shutdown)

    def _build(self, progress: Progress) -> tuple[Namespace, Any]:
        require("starting engines", "requests and outputs", "the frontend's engine")
        from vllm.engine.arg_utils import AsyncEngineArgs

        from dynamo_local.engine.vllm.frontend.core_client import build

        args = _parse(self._config)
        progress("loading the tokenizer")
        vllm_config = AsyncEngineArgs.from_cli_args(args).create_engine_config()
        timeout_s = self._config.get("grammar-timeout-s", RequestBounds.grammar_timeout_s)
        log_stats = not args.disable_log_stats
        return args, build(vllm_config, self._dispatcher, log_stats=log_stats, grammar_timeout_s=timeout_s)

    async def _application(self, args: Namespace, llm: Any) -> Any:
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.app import build_app

        tasks = await llm.get_supported_tasks()
        root = logging.getLogger()
        level = root.level
        app = build_app(args, tasks, llm.model_config)
        # A library that vLLM calls there raises the level of all logging, ours included.
        root.setLevel(level)
        await init_app_state(llm, app.state, args, tasks)
        add_routes(app)
        return app

    def _serve(self, args: Namespace, llm: Any, app: Any, listener: socket.socket) -> _Serving:
        import uvicorn
        from vllm.entrypoints.launchers.launcher import NoSignalServer

        from dynamo_local.engine.vllm.frontend.http_connections import Connections

        around = take_outer(app)
        config = uvicorn.Config(
            # Around everything: vLLM lets a bootstrap library rebuild the application's own list of middleware.
            around(self._gate(app)),
            # Which uvicorn would guess wrongly of layers that are no coroutine functions.
            interface="asgi3",
            http=Connections(self._limits).protocol,
            ws="none",
            log_level=args.uvicorn_log_level,
            access_log=not args.disable_uvicorn_access_log,
            ssl_keyfile=args.ssl_keyfile,
            ssl_certfile=args.ssl_certfile,
            ssl_ca_certs=args.ssl_ca_certs,
            ssl_cert_reqs=args.ssl_cert_reqs,
            timeout_keep_alive=int(os.environ.get(KEEP_ALIVE_ENV, "5")),
        )
        server = NoSignalServer(config)
        ending = Ending(server)
        task = asyncio.get_running_loop().create_task(server.serve(sockets=[listener]), name="http")
        return _Serving(llm, server, ending, task)

    async def _until_listening(self, serving: _Serving) -> None:
        while not serving.server.started:
            if serving.task.done():
                await serving.task
                raise EngineError("the HTTP server ended while it was starting")
            await asyncio.sleep(0.01)


def _parse(config: dict[str, Any]) -> Namespace:
    """The configuration through vLLM's own parser and checks. Raises ConfigError."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    allowed = combine(engine_schema(), server_schema(), adapter_schema())
    args: Namespace = parser.parse_args(to_argv(unsplit(config), allowed))
    try:
        validate_parsed_serve_args(args)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"vLLM refuses the frontend's configuration: {error}") from error
    return args
