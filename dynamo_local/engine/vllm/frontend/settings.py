"""Settings of the frontend as vLLM's server takes them."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from dynamo_local.core.errors import ConfigError
from dynamo_local.engine.vllm.arguments import adapter_schema, engine_schema, server_schema, to_argv, unsplit
from dynamo_local.sdk.config.schema import combine

_DEFAULTS = {
    "disable-uvicorn-access-log": True,
    "uvicorn-log-level": "warning",
}


def with_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with what is set here unless it is given."""
    # The documentation's page loads its scripts from this server, and not from the network.
    documented = not config.get("disable-fastapi-docs", False)
    return {**_DEFAULTS, "enable-offline-docs": documented, **config}


def parse(config: dict[str, Any]) -> Namespace:
    """Pass the configuration through vLLM's own parser and checks. Raises ConfigError."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    allowed = combine(engine_schema(), server_schema(), adapter_schema())
    args: Namespace = parser.parse_args(to_argv(unsplit(config), allowed))
    # In the engine, queries would have to stay where the documents are computed: requests choose among workers.
    args.enable_flash_late_interaction = False
    try:
        validate_parsed_serve_args(args)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"vLLM refuses the frontend's configuration: {error}") from error
    return args
