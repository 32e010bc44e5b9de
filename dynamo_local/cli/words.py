"""From words to what is asked for: those of `dynamo serve`, with the endpoints of its file, to a request; those of
`dynamo endpoint` to the fields of an endpoint."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dynamo_local.core.endpoints.checks import FIELDS, REPLACE, ROLL, read_spec
from dynamo_local.core.endpoints.spec import EndpointSpec
from dynamo_local.core.errors import ConfigError, UsageError
from dynamo_local.core.names import DEFAULT_NAMESPACE, check_endpoint
from dynamo_local.core.suggestions import suggest
from dynamo_local.engine.vllm.arguments import OF_SERVER, every_argument
from dynamo_local.engine.vllm.command_line import CommandLine, parse
from dynamo_local.sdk.config.configuration import ENDPOINTS
from dynamo_local.sdk.config.schema import SchemaTable, canonical
from dynamo_local.sdk.config.sections import Flag, Override, merge, parse_yaml, read_yaml
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


# Words of `dynamo endpoint create` and `update`.

_TEXTS = ("name", "model", "adapter_of", "engine", "policy")
_MAPPINGS = ("args", "labels")
_LISTS = ("awake",)


def name_and_flags(words: Sequence[str]) -> tuple[str, tuple[Flag, ...]]:
    """The endpoint's name, and options of vLLM's. Raises UsageError."""
    line = parse(words)
    if not line.targets:
        raise UsageError("no endpoint is named", "write its name first: dynamo endpoint create NAME ...")
    if len(line.targets) > 1:
        raise UsageError(f"{line.targets[1]!r} is one argument too many", "write values as --key=value")
    if line.overrides:
        key = line.overrides[0].partition("=")[0].partition(".")[2]
        raise UsageError(f"an endpoint has no services to configure by {line.overrides[0]}", f"write --arg {key}=VALUE")
    return check_endpoint(line.targets[0]), line.flags


def fields_of(given: Mapping[str, Any], flags: Sequence[Flag]) -> dict[str, Any]:
    """The fields that are given. Raises UsageError for what cannot be read."""
    fields = {name: value for name, value in given.items() if value is not None and name not in _MAPPINGS}
    fields = {name: value for name, value in fields.items() if value or name not in _LISTS}
    args = _args([*flags, *(_flag(text) for text in given["args"])])
    model = next((value for value in (args.pop("model", None),) if isinstance(value, str)), None)
    if model is not None and "model" not in fields:
        # A file for `vllm serve --config` names the model as well.
        fields["model"] = model
    labels = dict(_pair(text, "--label") for text in given["labels"])
    return with_local_model(fields | {name: value for name, value in (("args", args), ("labels", labels)) if value})


def ways(*, replace: bool, roll: bool) -> dict[str, bool]:
    """What an order says beside its fields."""
    return {name: True for name, given in ((REPLACE, replace), (ROLL, roll)) if given}


def changes_of(fields: Mapping[str, Any], settings: Iterable[str], unset: Iterable[str]) -> dict[str, Any]:
    """The changes of an update: fields by their options, by --set and by --unset. Raises UsageError."""
    changes = dict(fields)
    for text in settings:
        path, value = _setting(text)
        changes = merge(changes, _tree(path, value))
    for text in unset:
        changes = merge(changes, _tree(_path(text), None))
    if not changes:
        raise UsageError("nothing is to be changed", "name a field: --set max_workers=4")
    return with_local_model(changes)


def _setting(text: str) -> tuple[tuple[str, ...], Any]:
    name, value = _pair(text, "--set")
    path = _path(name)
    if path[0] in _TEXTS or path[0] == "labels":
        return path, value if value not in ("null", "~") else None
    if path[0] == "args" and len(path) > 1:
        return path, _value(path[1:], value)
    return path, parse_yaml(value, f"--set {name}")


def _path(text: str) -> tuple[str, ...]:
    """The parts of "max_workers" or "args.max-model-len". Raises UsageError for what is no field."""
    field, dot, key = text.partition(".")
    field = field.replace("-", "_")
    if field not in FIELDS:
        raise UsageError(f"an endpoint has no field {field}", suggest(field, FIELDS, "it has"))
    if not dot:
        return (field,)
    if field not in _MAPPINGS or not key:
        raise UsageError(f"{field} has no parts", f"write {field} alone")
    return (field, canonical(key) if field == "args" else key)


def _tree(path: Sequence[str], value: Any) -> dict[str, Any]:
    for name in reversed(path):
        value = {name: value}
    return dict(value)


def _args(flags: Iterable[Flag]) -> dict[str, Any]:
    args: dict[str, Any] = {}
    for flag in flags:
        args = merge(args, _tree(flag.path, _value(flag.path, flag.text)))
    return args


def _flag(text: str) -> Flag:
    key, value = _pair(text, "--arg")
    return Flag((canonical(key.removeprefix("--")),), value, f"--arg {key}", beside="")


def _value(path: Sequence[str], text: str) -> Any:
    """A setting's value as configuration reads it: as text where vLLM takes text, else as YAML."""
    tree: Any = Override("--arg", tuple(path), text, f"--arg {'.'.join(path)}").tree(SchemaTable(every_argument()))
    for name in path:
        tree = tree[name]
    return tree


def _pair(text: str, option: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise UsageError(f"{option} {text!r} has no value", f"write {option} KEY=VALUE")
    return key, value
