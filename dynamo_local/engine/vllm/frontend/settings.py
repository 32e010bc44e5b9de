"""Settings of the frontend as vLLM's server takes them."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from dynamo_local.core.errors import ConfigError
from dynamo_local.engine.vllm.arguments import adapter_schema, engine_schema, server_schema, to_argv, unsplit
from dynamo_local.sdk.config.schema import combine

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
        _import_parsers(args)
    except (ImportError, OSError, SyntaxError, TypeError, ValueError) as error:
        raise ConfigError(f"vLLM refuses the frontend's configuration: {error}") from error
    return args


def _import_parsers(args: Namespace) -> None:
    """Import the parsers of tool calls and reasoning that are the user's own, as vLLM's server does when it starts."""
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    if args.tool_parser_plugin:
        ToolParserManager.import_tool_parser(args.tool_parser_plugin)
    if args.reasoning_parser_plugin:
        ReasoningParserManager.import_reasoning_parser(args.reasoning_parser_plugin)
