"""From the words of `dynamo serve`, and the endpoints of its file, to what is asked for."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dynamo_local.core.endpoints.checks import read_spec
from dynamo_local.core.endpoints.spec import EndpointSpec
from dynamo_local.core.errors import ConfigError, UsageError
from dynamo_local.core.names import DEFAULT_NAMESPACE
from dynamo_local.engine.vllm.arguments import OF_SERVER
from dynamo_local.engine.vllm.command_line import CommandLine
from dynamo_local.sdk.config.configuration import ENDPOINTS
from dynamo_local.sdk.config.sections import Flag, read_yaml
from dynamo_local.supervisor.server.launch.request import OF_ENDPOINTS, ServeRequest
from state.endpoints.registry import read_registry
from state.paths import StatePaths

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_HUB_URL = re.compile(r"(?:https?://(?:www\.)?(?:huggingface\.co|hf\.co)/|hf://(?:models/)?)([^/?#]+/[^/?#]+)")
_WINDOWS = re.compile(r"[A-Za-z]:[\\/]|\\\\")
_HUB_ID = re.compile(r"\w[\w.-]*(?:/[\w.-]+)?(?:@[^\s@]+)?")

_WHAT = "give a folder, a Hugging Face id (ORGANISATION/NAME), or a graph (package.module:Service)"

_MODEL = "model"
_EXAMPLE = "write `endpoints:` with `- {name: ..., model: ...}` lines under it"
_MISSPELT = ("endpoint", "endpoints", "models")


def request_of(
    line: CommandLine, model: str | None, config: Path | None, namespace: str | None, *, forget: bool, **options: Any
) -> ServeRequest:
    """What `dynamo serve` is asked for. `model`: as --model names it. `options`: fields of the request that have the
    names of options.

    Raises UsageError, ConfigError or StateError if neither a graph nor a model is named, and no endpoints are, or two
    are named.
    """
    endpoints = endpoints_in(config)
    unnamed = not line.targets and model is None
    alone = endpoints is not None or (unnamed and not forget and _has_ordered(namespace))
    flags = tuple(flag for flag in line.flags if flag.path != (_MODEL,))
    if model is None:
        # A file for `vllm serve --config` names the model as well.
        model = next((flag.text for flag in line.flags if flag.path == (_MODEL,)), None)
    if model is not None and not model.strip():
        raise UsageError("--model is empty", "name a folder, a Hugging Face id, or one of smollm2, random, quickstart")
    if len(line.targets) > 1:
        raise UsageError(f"{line.targets[1]!r} is one argument too many", "write values as --key=value")
    if not line.targets and model is None:
        _check_alone(flags, alone=alone)
        graph: str | None = OF_ENDPOINTS
    else:
        graph, model = _named(line.targets, model)
    return ServeRequest(
        graph=graph,
        model=model,
        config=config,
        overrides=line.overrides,
        flags=flags,
        namespace=namespace,
        endpoints=endpoints or (),
        forget=forget,
        **options,
    )


def _check_alone(flags: Sequence[Flag], *, alone: bool) -> None:
    """Raise UsageError if there are no endpoints, or if options go with a model: there is no engine that would take
    others than those of the HTTP server."""
    if not alone:
        raise UsageError(
            "no graph named, and no model",
            "write `dynamo serve MODEL` or `dynamo serve MODULE:SERVICE`, or list endpoints in a file (-f)",
        )
    of_models = [flag for flag in flags if flag.path[0] not in OF_SERVER]
    if of_models:
        said = f"{of_models[0].typed} goes with a model, and none is named"
        raise UsageError(said, "write it under args of an endpoint")


def _named(targets: Sequence[str], model: str | None) -> tuple[str | None, str | None]:
    """The graph, None if a model is to be served, and the model. Raises UsageError."""
    target = targets[0] if targets else str(model)
    if names_graph(target):
        return target, model
    if targets and model is not None:
        raise UsageError(f"two models are named, {target} and {model}", "leave out --model")
    return None, target


def names_graph(text: str) -> bool:
    """Whether the text names a graph, and not a model. Raises UsageError for what can be neither."""
    if _URL.match(text):
        hub = _HUB_URL.match(text)
        raise UsageError(f"{text!r} is an address, not a model", f"write {hub[1]}" if hub else _WHAT)
    if _WINDOWS.match(text) or ("\\" in text and "/" not in text):
        raise UsageError(f"{text!r} is a path of Windows", "write the folder as this system has it: /models/mine")
    # Not Path.exists, which raises where this user may not look.
    if text and os.access(Path(text).expanduser(), os.F_OK):
        return False
    module, colon, service = text.partition(":")
    if colon:
        _check_graph(text, module, service)
        return True
    if _is_module(text) and "." in text:
        return True
    _check_model(text)
    return False


def _check_graph(text: str, module: str, service: str) -> None:
    if not _is_module(module):
        raise UsageError(f"{text!r} is no model and no graph", _WHAT)
    if service and not service.isidentifier():
        remedy = f"names with a tag are Ollama's; {_WHAT}"
        raise UsageError(f"{text!r} names no service, since {service!r} is no name of a class", remedy)


def _is_module(text: str) -> bool:
    return all(part.isidentifier() for part in text.split("."))


def _check_model(text: str) -> None:
    """Raise UsageError for what can be neither a path nor an id. Whether it is there is checked later."""
    looks_like_path = text.startswith((".", "/", "~")) or text.count("/") > 1
    if not looks_like_path and not _HUB_ID.fullmatch(text):
        raise UsageError(f"{text!r} is no model", _WHAT)


def endpoints_in(config: Path | None) -> tuple[EndpointSpec, ...] | None:
    """The endpoints of a configuration file; None if it does not say. Raises ConfigError, which names file and
    endpoint. Relative paths of models are those in the folder of the file."""
    if config is None:
        return None
    tree = read_yaml(config)
    if not isinstance(tree, Mapping) or ENDPOINTS not in tree:
        _check_spelling(config, tree)
        return None
    listed = tree[ENDPOINTS]
    if listed is None:
        raise ConfigError(f"{config}: nothing is listed under {ENDPOINTS}", f"{_EXAMPLE}, or `{ENDPOINTS}: []`")
    if not isinstance(listed, Sequence) or isinstance(listed, str):
        raise ConfigError(f"{config}: {ENDPOINTS} is not a list", _EXAMPLE)
    specs = [_read(fields, config.parent, f"{config}: {ENDPOINTS}[{index}]") for index, fields in enumerate(listed)]
    names = [spec.name for spec in specs]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{config}: endpoint {name} is given twice", "rename one of them")
    return tuple(specs)


def _check_spelling(config: Path, tree: object) -> None:
    """Raise ConfigError for a file without the key `endpoints` that was meant to have it."""
    if isinstance(tree, Sequence) and not isinstance(tree, str):
        raise ConfigError(f"{config} is a list", f"write `{ENDPOINTS}:` in a line above it")
    for key in tree if isinstance(tree, Mapping) else ():
        if str(key).lower() in _MISSPELT:
            raise ConfigError(f"{config}: the key {key} means nothing", f"write `{ENDPOINTS}:`")


def with_local_model(fields: Mapping[str, Any], folder: Path = Path()) -> dict[str, Any]:
    """The fields of an endpoint with the path of its model made absolute: the registry is read in other folders, too.

    `folder`: where relative paths begin. Raises UsageError for what can be no model.
    """
    model = fields.get("model")
    if not isinstance(model, str) or not model.strip():
        return dict(fields)
    path = folder / Path(model).expanduser()
    if path.is_dir():
        return {**fields, "model": str(path.absolute().resolve())}
    if model.startswith("."):
        raise UsageError(
            f"model {model} is no folder in {folder.absolute()}", "write its path from there, or all of it"
        )
    if names_graph(model):
        raise UsageError(f"{model!r} is a graph, and an endpoint has a model", "name a folder or a Hugging Face id")
    is_path = model.startswith(("/", "~"))
    return {**fields, "model": str(path.absolute().resolve()) if is_path else model}


def _read(fields: Any, folder: Path, origin: str) -> EndpointSpec:
    try:
        return read_spec(with_local_model(fields, folder) if isinstance(fields, Mapping) else fields)
    except UsageError as error:
        raise ConfigError(f"{origin}: {error.cause}", error.remedy) from error


def _has_ordered(namespace: str | None) -> bool:
    """Whether endpoints were ordered in the namespace earlier. Raises ConfigError, StateError."""
    return bool(read_registry(StatePaths.of(namespace or DEFAULT_NAMESPACE, os.environ)).entries)
