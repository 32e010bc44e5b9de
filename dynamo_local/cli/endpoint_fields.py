"""From the words of `dynamo endpoint create` and `update` to the fields of an endpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dynamo_local.cli.serve_request import with_local_model
from dynamo_local.core.endpoints.checks import FIELDS, REPLACE, ROLL
from dynamo_local.core.errors import UsageError
from dynamo_local.core.names import check_endpoint
from dynamo_local.core.suggestions import suggest
from dynamo_local.engine.vllm.arguments import every_argument
from dynamo_local.engine.vllm.command_line import parse
from dynamo_local.sdk.config.schema import SchemaTable, canonical
from dynamo_local.sdk.config.sections import Flag, Override, merge, parse_yaml

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
