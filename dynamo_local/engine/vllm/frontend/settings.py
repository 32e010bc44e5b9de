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
