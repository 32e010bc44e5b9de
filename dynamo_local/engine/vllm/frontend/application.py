"""vLLM's OpenAI application for one model, in front of a dispatcher.

The application is vLLM's own (`build_app`, `init_app_state`). A process may have several: they are built one after
another, in a thread of their own, while the others answer.
"""

from __future__ import annotations

import asyncio
import logging
from argparse import Namespace
from collections import Counter
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamo_local.core.errors import ConfigError, EngineError, RequestError, one_line
from dynamo_local.core.http.asgi import App, Receive, Scope, Send
from dynamo_local.core.http.bounds.request import RequestBounds
from dynamo_local.core.messages.endpoints import ServedAdapter
from dynamo_local.core.ports import Dispatcher, Progress
from dynamo_local.engine.vllm.arguments import (
    adapter_schema,
    chooses_log,
    engine_schema,
    server_schema,
    to_argv,
    unsplit,
)
from dynamo_local.engine.vllm.environment import prepare_environment
from dynamo_local.engine.vllm.frontend.surface import name_roots, take_outer
from dynamo_local.engine.vllm.patches.table import require
from dynamo_local.sdk.config.schema import combine

_BUILDER = ThreadPoolExecutor(1, thread_name_prefix="build-application")
"""The thread of all builds: parts of vLLM are replaced for the whole process while a model is built."""

_tokenizers: Counter[str] = Counter()
"""Number of models built with each tokenizer. Used in the thread that builds alone."""


@dataclass(frozen=True)
class _Built:
    llm: Any
    app: Any
    args: Namespace
    metrics: Any
    """The registry of its metrics; None: it has none."""


class ModelApplication:
    """An ASGI application that answers for one model.

    `config` holds keys of the engine's and the server's schema; others are ignored. `private_dir`: see
    environment.py.
    """

    def __init__(self, config: Mapping[str, Any], private_dir: Path, dispatcher: Dispatcher) -> None:
        self._config = with_defaults(config)
        self._private_dir = private_dir
        self._dispatcher = dispatcher
        self._built: _Built | None = None
        self._statistics: asyncio.Task[None] | None = None
        self._answer: App | None = None
        self._name = ""

    async def start(self, progress: Progress) -> None:
        """Load the tokenizer and build the application. Raises EngineError."""
        loop = asyncio.get_running_loop()
        prepare_environment(self._private_dir)
        progress("waiting for another model's application to be built")
        try:
            self._built = await loop.run_in_executor(_BUILDER, self._build, progress)
            await _give_state(self._built)
        except (Exception, SystemExit) as error:
            await self.close()
            raise EngineError(f"the OpenAI server cannot start: {one_line(error)}") from error
        if self._built.app.state.log_stats:
            self._statistics = loop.create_task(_log_statistics(self._built.llm), name="statistics of vLLM")
        self._answer, self._name = self._built.app, self._built.llm.model_config.served_model_name

    async def close(self) -> None:
        """Free what the model has: threads, metrics, memory. Requests under way are to have ended. Never raises."""
        if self._built is None:
            return
        built, self._built, self._answer = self._built, None, None
        if self._statistics is not None:
            self._statistics.cancel()
            # It has the engine's client.
            self._statistics = None
        await asyncio.get_running_loop().run_in_executor(_BUILDER, _free, built)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        from dynamo_local.engine.vllm.patches.metrics import answering

        if self._answer is None:
            raise EngineError("the application of this model is not built")
        answering.set(self._name)
        await self._answer(scope, receive, send)

    @property
    def paths(self) -> frozenset[str]:
        """Paths at which the application answers: those of what the model does."""
        routes = () if self._built is None else self._built.app.routes
        return frozenset(path for route in routes if (path := getattr(route, "path", None)) is not None)

    @property
    def vocabulary(self) -> int | None:
        """Number of token ids that the model has, added ones included; None: the application is not built."""
        if self._built is None:
            return None
        llm = self._built.llm
        size: int = max(llm.model_config.get_vocab_size(), llm.get_tokenizer().max_token_id + 1)
        return size

    async def cards(self) -> list[dict[str, Any]]:
        """Return the model and its adapters as /v1/models shows them."""
        if self._built is None:
            return []
        listed = await self._built.app.state.openai_serving_models.show_available_models()
        return [card.model_dump() for card in listed.data]

    async def serve_adapters(self, adapters: Collection[ServedAdapter]) -> None:
        """Serve these LoRA adapters beside those of the configuration, and no others."""
        if self._built is None:
            return
        from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest

        models, keys = self._built.app.state.openai_serving_models, self._built.llm.engine_core.adapter_keys
        static = {adapter.name for adapter in models.static_lora_modules or ()}
        wanted = {adapter.name: adapter for adapter in adapters if adapter.name not in static}
        for name in [known for known in models.lora_requests if known not in wanted and known not in static]:
            del models.lora_requests[name]
        for name, adapter in wanted.items():
            known = models.lora_requests.get(name)
            if known is not None and (keys.get(known.lora_int_id), known.lora_path) == (adapter.key, adapter.path):
                continue
            models.lora_requests.pop(name, None)
            loaded = await models.load_lora_adapter(LoadLoRAAdapterRequest(lora_name=name, lora_path=adapter.path))
            if isinstance(loaded, str):
                number = models.lora_requests[name].lora_int_id
                keys[number] = adapter.key
                await _note_content(self._built.llm.engine_core.hashing, number, adapter)
            else:
                logging.getLogger(__name__).error("adapter %s cannot be served: %s", name, loaded.error.message)

    def _build(self, progress: Progress) -> _Built:
        progress("importing vLLM")
        require(
            "HTTP connections",
            "the frontend's engine",
            "failures of single requests",
            "counting of tokens",
            "prompts of kept answers",
        )
        from vllm.engine.arg_utils import AsyncEngineArgs

        from dynamo_local.engine.vllm.frontend.core_client import build
        from dynamo_local.engine.vllm.patches.frontend import show_requests
        from dynamo_local.engine.vllm.patches.metrics import (
            count_tool_calls_by_model,
            model_metrics,
            stat_logger,
        )
        from dynamo_local.engine.vllm.requests.wire import tasks_of

        args = parse(self._config)
        progress("loading the tokenizer")
        vllm_config = AsyncEngineArgs.from_cli_args(args).create_engine_config()
        timeout_s = self._config.get("grammar-timeout-s", RequestBounds.grammar_timeout_s)
        metrics = None if args.disable_log_stats else model_metrics().add()
        count_tool_calls_by_model()
        llm = None
        try:
            loggers: list[Any] = [] if metrics is None else [stat_logger(metrics)]
            llm = build(
                vllm_config,
                self._dispatcher,
                log_stats=metrics is not None,
                log_requests=args.enable_log_requests,
                loggers=loggers,
                grammar_timeout_s=timeout_s,
            )
            if args.enable_log_requests and not chooses_log(self._config):
                show_requests()
            built = _Built(llm, build_app(args, llm, tasks_of(vllm_config.model_config)), args, metrics)
            _tokenizers[vllm_config.model_config.tokenizer] += 1
            return built
        except BaseException:
            if metrics is not None:
                model_metrics().remove(metrics)
            if llm is not None:
                llm.shutdown()
            raise


async def _give_state(built: _Built) -> None:
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state

    tasks = await built.llm.get_supported_tasks()
    await init_app_state(built.llm, built.app.state, built.args, tasks)
    if "generate" in tasks:
        _check_chat_template(built)
    name_roots(built.app)


def _check_chat_template(built: _Built) -> None:
    """Raise EngineError for a chat template that cannot be read. vLLM would tell the client of each chat that its
    request is wrong."""
    from jinja2 import TemplateSyntaxError
    from transformers.utils import chat_template_utils
    from vllm.renderers.hf import HfRenderer, resolve_chat_template

    online = built.app.state.online_renderer
    renderer = online.renderer
    if not isinstance(renderer, HfRenderer) or renderer.tokenizer is None:
        return
    model = built.llm.model_config
    template = resolve_chat_template(renderer.tokenizer, online.chat_template, None, model_config=model)
    try:
        if template is not None:
            chat_template_utils._compile_jinja_template(template)
    except TemplateSyntaxError as error:
        why = f"the chat template cannot be read: {error.message} (line {error.lineno})"
        raise EngineError(why, "mend it, or name another one by chat-template") from error


async def _note_content(hashing: Any, number: int, adapter: ServedAdapter) -> None:
    """Note by which name engines know the adapter's content. Without it, nobody finds where its prefixes are cached."""
    from dynamo_local.engine.vllm.requests.lora import name_of_content

    with suppress(RequestError):
        hashing.contents[number] = await asyncio.to_thread(name_of_content, adapter.key, adapter.path)


def build_app(args: Namespace, llm: Any = None, tasks: tuple[Any, ...] = ("generate",)) -> Any:
    """Return vLLM's application for these arguments, for a model with these tasks. Without `llm` it has no state: it
    can answer for no model."""
    from starlette.exceptions import HTTPException
    from vllm.entrypoints.launchers.app import build_app as build
    from vllm.entrypoints.serve.exception_handling.handlers.http import http_exception_handler

    from dynamo_local.engine.vllm.frontend.surface import tell_invalid_bodies
    from dynamo_local.engine.vllm.patches.metrics import count_http_together, http_counters

    http_counters()
    root = logging.getLogger()
    level = root.level
    app: Any = build(args, tasks, None if llm is None else llm.model_config)
    # A library that vLLM calls there raises the level of all logging, ours included.
    root.setLevel(level)
    count_http_together(app)
    if llm is not None:
        # The server has these layers around all applications.
        take_outer(app)
    # vLLM registers the handler for FastAPI's exception alone, not for Starlette's own (no such path or method).
    app.add_exception_handler(HTTPException, http_exception_handler)
    tell_invalid_bodies(app)
    return app


async def _log_statistics(llm: Any) -> None:
    """Have vLLM log its statistics, which it does at level INFO."""
    from vllm import envs

    while True:
        await asyncio.sleep(envs.VLLM_LOG_STATS_INTERVAL)
        try:
            await llm.do_log_stats()
        except Exception:
            # Of a kind that vLLM decides; requests do not depend on it.
            logging.getLogger(__name__).exception("the statistics of vLLM cannot be logged")


def _free(built: _Built) -> None:
    from dynamo_local.engine.vllm.patches.metrics import model_metrics

    if built.metrics is not None:
        model_metrics().remove(built.metrics)
    built.llm.shutdown()
    _forget_tokenizer(built.llm.model_config.tokenizer)
    _take_apart(built)


def _take_apart(built: _Built) -> None:
    """Free the parts of an application now. They refer to each other in circles, which only a search of the whole
    process for garbage would find: that takes half a second, in which nothing answers."""
    app, llm = built.app, built.llm
    state = vars(app.state)["_state"]
    serving = [part for part in state.values() if type(part).__module__.startswith("vllm.entrypoints")]
    engine = (llm.renderer, llm.input_processor, llm.output_processor, llm)
    for part in (*serving, *app.routes, app.router, app, *engine):
        vars(part).clear()
    state.clear()


def _forget_tokenizer(path: str) -> None:
    """Have vLLM load the tokenizer anew for the next model, if no model has it any more: its files may change."""
    from vllm.tokenizers.registry import cached_get_tokenizer

    _tokenizers[path] -= 1
    if _tokenizers[path] <= 0:
        del _tokenizers[path]
        # The others' are loaded again when a model is built with them: the cache can only be cleared as a whole.
        cached_get_tokenizer.cache_clear()


# The frontend's settings as vLLM's server takes them.

_QUIET, _EXCEPT = "disable-uvicorn-access-log", "disable-access-log-for-endpoints"


def with_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with what is set here unless it is given."""
    # Who names paths that the access log leaves out wants the others in it.
    quiet = config.get(_QUIET)
    quiet = not config.get(_EXCEPT) if quiet is None else quiet
    # uvicorn writes the access log at level INFO.
    level = "warning" if quiet else "info"
    # The documentation's page loads its scripts from this server, and not from the network.
    documented = not config.get("disable-fastapi-docs", False)
    return {"uvicorn-log-level": level, "enable-offline-docs": documented, **config, _QUIET: quiet}


def parse(config: dict[str, Any]) -> Namespace:
    """Pass the configuration through vLLM's own parser and checks. Raises ConfigError."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.utils.import_utils import import_plugin

    parser = make_arg_parser(FlexibleArgumentParser())
    allowed = combine(engine_schema(), server_schema(), adapter_schema())
    args: Namespace = parser.parse_args(to_argv(unsplit(config), allowed))
    # In the engine, queries would have to stay where the documents are computed: requests choose among workers.
    args.enable_flash_late_interaction = False
    # The server removes the prefix before the gate sees a path (outer.under). An application that did it again would
    # answer at another path than the gate has let in.
    args.root_path = None
    try:
        validate_parsed_serve_args(args)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"vLLM refuses the frontend's configuration: {error}") from error
    for plugin in (args.tool_parser_plugin, args.reasoning_parser_plugin):
        # As vLLM's server does when it starts, which goes on if there is nothing to import.
        if plugin and import_plugin(plugin) is None:
            raise ConfigError(f"the parsers in {plugin} cannot be imported", "the log of the frontend says why")
    return args
