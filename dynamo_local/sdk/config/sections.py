"""What is said to services before it is resolved: sections of files, options of one service, flags of several. Read and
checked."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from dynamo_local.core.errors import ConfigError
from dynamo_local.core.fleet.view import ENGINE_ROLES
from dynamo_local.core.suggestions import suggest
from dynamo_local.sdk.config.resolved import shown
from dynamo_local.sdk.config.schema import (
    ConfigSchema,
    KeySpec,
    SchemaTable,
    canonical,
    check_variables,
    coerce,
    fixed_by,
    refused_in,
)
from dynamo_local.sdk.resources import Resources
from dynamo_local.sdk.service import ServiceSpec

# Reads YAML with stricter rules than PyYAML's own.
#
# Scalars are nearly those of YAML 1.2's core schema: only true and false are booleans, 010 and 12:30 and 2024-01-01 are
# text, 1e-3 is a number. A duplicate key is an error. Errors give a line number and never the text, which may hold
# secrets.


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  # PyYAML's own attribute


_TAG = "tag:yaml.org,2002:"
_Loader.add_implicit_resolver(f"{_TAG}null", re.compile(r"(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
_Loader.add_implicit_resolver(f"{_TAG}bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
_Loader.add_implicit_resolver(f"{_TAG}int", re.compile(r"[-+]?(?:0|[1-9][0-9]*)$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    f"{_TAG}float",
    re.compile(r"[-+]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?$"),
    list("-+.0123456789"),
)
_Loader.add_implicit_resolver(f"{_TAG}merge", re.compile(r"<<$"), ["<"])


def _construct_mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        if key_node.tag == f"{_TAG}merge":
            continue
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str | int | float | bool | None):
            raise yaml.constructor.ConstructorError(None, None, "a key is not text", key_node.start_mark)
        if key in seen:
            raise yaml.constructor.ConstructorError(None, None, f"key {key!r} occurs twice", key_node.start_mark)
        seen.add(key)
    loader.flatten_mapping(node)
    return {
        loader.construct_object(key, deep=True): loader.construct_object(value, deep=True) for key, value in node.value
    }


_Loader.add_constructor(f"{_TAG}map", _construct_mapping)


def parse_yaml(text: str, origin: str) -> Any:
    """Parse YAML. Raises ConfigError with a message of one line that starts with `origin`."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{origin}:{where} is not YAML: {error.problem or error.context}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{origin} is not YAML", "write `Service:` with `key: value` lines under it") from error


def read_yaml(path: Path) -> Any:
    """Read and parse a YAML file. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read configuration {path}: {cause}") from error
    return parse_yaml(text, str(path))


# Reads and checks one service's section of a configuration.
#
# A command-line option is a section with one key, and is checked like a section of a file.

COMMON = "Common"
TAKES = "common-configs"
ARGS = "ServiceArgs"

TAKEN = KeySpec(TAKES, "list", help="Keys of Common that the service takes.")
"""The key with which a service lists the keys that it takes from Common."""

SERVICE_ARGS = SchemaTable.of(
    KeySpec("workers", "int", help="Number of workers of the service, at least 1. By default as the service declares."),
    KeySpec("resources", "dict", help="Resources of each worker."),
    KeySpec("envs", "dict", help="Environment variables of the service's processes. Values are text."),
)
"""Keys of ServiceArgs, a section that every service has."""

_ARGS_KEYS = tuple(SERVICE_ARGS.keys())


@dataclass(frozen=True)
class Section:
    """The values of one source for one service. None or empty: not given."""

    values: Mapping[str, Any] = field(default_factory=dict)
    takes: tuple[str, ...] = ()
    workers: int | None = None
    resources: Mapping[str, Any] = field(default_factory=dict)
    envs: Mapping[str, str] = field(default_factory=dict)

    def under(self, other: Section) -> Section:
        """Return this section merged with `other`, whose values win. Mappings are merged deeply."""
        return Section(
            values=merge(self.values, other.values),
            takes=tuple(dict.fromkeys((*self.takes, *other.takes))),
            workers=self.workers if other.workers is None else other.workers,
            resources={**self.resources, **other.resources},
            envs={**self.envs, **other.envs},
        )


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two mappings; values of `over` win, and values that are mappings on both sides are merged likewise."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def read_section(spec: ServiceSpec, raw: Any, origin: str) -> Section:
    """Read and check a section. `origin` names its source in errors. Raises ConfigError."""
    given = _mapping(raw, spec.name, origin)
    args = _mapping(given.pop(ARGS, None), f"{spec.name}.{ARGS}", origin)
    takes = given.pop(TAKES, None)
    for name in args:
        if name not in _ARGS_KEYS:
            raise ConfigError(f"{origin}: {spec.name}.{ARGS} has no key {name}", suggest(str(name), _ARGS_KEYS))
    return Section(
        values={name: check_value(spec, name, value, origin) for name, value in read_keys(given, spec.name, origin)},
        takes=_takes(spec, takes, origin),
        workers=_workers(spec, args.get("workers"), origin),
        resources=_resources(spec, args.get("resources"), origin),
        envs=_envs(spec, args.get("envs"), origin),
    )


def read_keys(raw: Any, section: str, origin: str) -> list[tuple[str, Any]]:
    """Return the keys in canonical spelling, with unchecked values.

    Raises ConfigError for a key given twice.
    """
    pairs = [(canonical(str(name)), value) for name, value in _mapping(raw, section, origin).items()]
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{origin}: {section}.{name} is given twice, once with underscores", "remove one")
    return pairs


def check_value(spec: ServiceSpec, name: str, value: Any, origin: str, source: str = "") -> Any:
    """Return the value, converted as the service's schema demands. `source` names the section of its origin, if it is
    another one. Raises ConfigError."""
    keys = spec.schema.keys()
    if name not in keys:
        raise _no_key(spec, name, f"{origin}: {spec.name} has no key {name}", (*keys, ARGS))
    try:
        return coerce(keys[name], value)
    except ValueError as error:
        via = f" (from {source})" if source else ""
        raise ConfigError(f"{origin}: {spec.name}.{name}{via} is {shown(name, value)}", str(error)) from error


def _no_key(spec: ServiceSpec, name: str, cause: str, keys: Iterable[str]) -> ConfigError:
    fixed = fixed_by(spec.schema)
    if name in fixed:
        return ConfigError(f"{cause}: dynamo-local sets it", fixed[name])
    return ConfigError(cause, suggest(name, keys))


def _mapping(raw: Any, section: str, origin: str) -> dict[str, Any]:
    if raw is None:
        return {}
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{origin}: {section} is not a mapping", "write `key: value` lines under it")
    return dict(raw)


def _takes(spec: ServiceSpec, raw: Any, origin: str) -> tuple[str, ...]:
    if raw is None:
        return ()
    if not isinstance(raw, list) or not all(isinstance(name, str) for name in raw):
        raise ConfigError(f"{origin}: {spec.name}.{TAKES} is not a list of keys", "write it as [key, key]")
    names = tuple(canonical(name) for name in raw)
    keys = spec.schema.keys()
    for name in names:
        if name not in keys:
            raise _no_key(spec, name, f"{origin}: {spec.name}.{TAKES} lists {name}, {spec.name} has no such key", keys)
    return names


def _workers(spec: ServiceSpec, raw: Any, origin: str) -> int | None:
    if raw is None:
        return None
    if isinstance(raw, bool) or not isinstance(raw, int) or raw < 1:
        raise ConfigError(f"{origin}: {spec.name}.{ARGS}.workers is {raw!r}", "expected int of at least 1")
    return raw


def _resources(spec: ServiceSpec, raw: Any, origin: str) -> Mapping[str, Any]:
    try:
        Resources.parse(raw)
    except ValueError as error:
        raise ConfigError(f"{origin}: {spec.name}.{ARGS}: {error}") from error
    return raw or {}


def _envs(spec: ServiceSpec, raw: Any, origin: str) -> dict[str, str]:
    envs: dict[Any, Any] = _mapping(raw, f"{spec.name}.{ARGS}.envs", origin)
    for name, value in envs.items():
        where = f"{origin}: {spec.name}.{ARGS}.envs.{name}"
        if not isinstance(name, str) or not name or "=" in name or "\0" in name:
            raise ConfigError(f"{where} is not a variable's name")
        # YAML does not keep the text of numbers such as 1.10, nor the spelling of true.
        if isinstance(value, bool) or not isinstance(value, str | int) or "\0" in str(value):
            raise ConfigError(f"{where} is not text", "put its value in quotes")
    texts = {name: str(value) for name, value in envs.items()}
    check_variables(texts, refused_in(spec.schema), f"{origin}: {spec.name}.{ARGS}.envs.")
    return texts


# Reads command-line options `--Service.key.sub=value` as configuration.
#
# Values are YAML, except for keys of kind `str`, which take the text as it stands.


@dataclass(frozen=True)
class Override:
    """A command-line option, split into its parts. `text` is None without `=`.

    `typed`: the option as the user typed it, without its value, where that is another spelling (`Flag`).
    """

    section: str
    path: tuple[str, ...]
    text: str | None
    typed: str | None = None

    @property
    def origin(self) -> str:
        """The option without its value, which may be a secret."""
        return self.typed or f"--{'.'.join((self.section, *self.path))}"

    def tree(self, schema: ConfigSchema) -> dict[str, Any]:
        """Return the option as nested mappings, like a section of a file. Raises ConfigError."""
        value = self._value(schema.keys().get(canonical(self.path[0])))
        for name in reversed(self.path):
            value = {name: value}
        return value  # type: ignore[no-any-return]  # the path is not empty

    def _value(self, spec: KeySpec | None) -> Any:
        if self.text is None:
            if spec is not None and spec.kind in ("bool", "any") and len(self.path) == 1:
                return True
            raise ConfigError(f"{self.origin} has no value", f"write {self.origin}=VALUE")
        if self.path[:2] == (ARGS, "envs") and len(self.path) == 3:
            return self.text
        if spec is not None and spec.kind == "str" and len(self.path) == 1 and self._is_text(spec):
            return self.text
        return parse_yaml(self.text, self.origin)

    def _is_text(self, spec: KeySpec) -> bool:
        """Return whether the text is the value, so that `--Middle.suffix=!` needs no YAML quotes."""
        text = self.text or ""
        quoted = len(text) >= 2 and text[0] == text[-1] and text[0] in "'\""
        return not quoted and not (spec.optional and text in ("null", "~"))


def parse_override(option: str) -> Override:
    """Split an option into its parts. Raises ConfigError."""
    name, equals, text = option.removeprefix("--").partition("=")
    section, *path = name.split(".")
    if not option.startswith("--") or not section or not path or not all(path):
        raise ConfigError(
            f"option {'--' * option.startswith('--')}{name} is not understood", "write --Service.key=value"
        )
    return Override(section, tuple(path), text if equals else None)


# Options that name a key and no service, such as `--max-model-len 4096`. Each is for all services with the key.


@dataclass(frozen=True)
class Flag:
    """An option without a service, with its value as text.

    `path`: the key and, for a part of a mapping, what leads to it. `typed`: the option as the user typed it.
    `beside`: a key that a service must have as well, since keys of other services may have the same name by chance.
    `engines_only`: services without an engine do not get the option, although they have the key.
    """

    path: tuple[str, ...]
    text: str
    typed: str
    beside: str
    engines_only: bool = False


def overrides_of(specs: Sequence[ServiceSpec], flags: Sequence[Flag]) -> Iterator[Override]:
    """Yield the flags as options of the services that take them. Raises ConfigError if no service takes one."""
    for flag in flags:
        takers = [spec for spec in specs if {flag.path[0], flag.beside} <= set(spec.schema.keys())]
        engines = [spec for spec in takers if spec.role in ENGINE_ROLES]
        if not takers:
            raise ConfigError(f"{flag.typed}: no service of the graph has this setting", "leave it out")
        for spec in engines if flag.engines_only and engines else takers:
            yield Override(spec.name, flag.path, flag.text, flag.typed)
