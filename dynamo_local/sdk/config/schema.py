"""Schemas of configuration: the keys of a service, and the kinds of their values.

Keys are spelled in kebab-case; underscores are accepted and mean the same.
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import Any, Literal, Protocol, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from dynamo_local.core.errors import ConfigError, DecodeError, GraphError

Kind = Literal["int", "float", "bool", "str", "list", "dict", "any"]

_T = TypeVar("_T")
_INT64 = 2**63
_converting = Lock()
"""Dataclasses are looked at as `core.codec.prepare_structs` says of structs, and are not known before."""


class KeySpec(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A key of a schema. `choices`: the only allowed values, if there are any. `optional`: null is allowed."""

    name: str
    kind: Kind = "any"
    choices: tuple[str | int | float | bool, ...] = ()
    optional: bool = False
    required: bool = False
    """The key has no default and must be given."""
    default: Any = None
    """Default, for display only: the service applies it."""
    help: str = ""

    @property
    def expected(self) -> str:
        """The allowed values in words, for error messages."""
        words = f"one of {', '.join(map(str, self.choices))}" if self.choices else self.kind
        return f"{words} or null" if self.optional else words


@dataclasses.dataclass(frozen=True)
class RefusedVariable:
    """An environment variable that a service must not have. `harmless`: values that change nothing, in lower case."""

    remedy: str
    harmless: frozenset[str] = frozenset({""})

    def is_refused(self, value: str) -> bool:
        return value.strip().lower() not in self.harmless


def check_variables(environ: Mapping[str, str], refused: Mapping[str, RefusedVariable], where: str = "") -> None:
    """Raise ConfigError for the first variable that is refused with this value, which is not told: it may be a secret.
    `where` stands before the variable's name in the message."""
    for name, variable in refused.items():
        if name in environ and variable.is_refused(environ[name]):
            raise ConfigError(
                f"{where or 'the environment variable '}{name} is not for `dynamo serve`", variable.remedy
            )


class ConfigSchema(Protocol):
    """The keys that a service takes, by canonical name."""

    def keys(self) -> Mapping[str, KeySpec]: ...


@dataclasses.dataclass(frozen=True)
class SchemaTable:
    """A schema with a table of keys. `settings`: the dataclasses that keys were read from.

    `fixed`: names of vLLM that are not keys here because the project sets them, each with what to do instead.

    `agreed`: keys, and dotted paths in them, on which all services of a graph with the key must agree, each with the
    name under which values are compared.

    `variables`: environment variables that the service must not have.
    """

    table: Mapping[str, KeySpec]
    settings: tuple[type, ...] = ()
    fixed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    agreed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    variables: Mapping[str, RefusedVariable] = dataclasses.field(default_factory=dict)

    def keys(self) -> Mapping[str, KeySpec]:
        return self.table

    @classmethod
    def of(cls, *specs: KeySpec) -> SchemaTable:
        return cls(types.MappingProxyType({spec.name: spec for spec in specs}))

    @classmethod
    def from_json(cls, data: bytes) -> SchemaTable:
        """Read a JSON list of key specifications. Raises DecodeError."""
        try:
            specs = msgspec.json.decode(data, type=list[KeySpec])
        except msgspec.DecodeError as error:
            raise DecodeError(f"not a list of configuration keys: {error}") from error
        return cls.of(*(msgspec.structs.replace(spec, name=canonical(spec.name)) for spec in specs))

    def to_json(self) -> bytes:
        """Return the keys as the JSON that `from_json` reads."""
        return msgspec.json.format(msgspec.json.encode(list(self.table.values())), indent=1)


def canonical(key: str) -> str:
    """Return a key in kebab-case, as keys are compared and stored."""
    return key.replace("_", "-")


def combine(*schemas: ConfigSchema) -> SchemaTable:
    """Return a schema with the keys of all given ones. Raises GraphError if two have the same key."""
    table: dict[str, KeySpec] = {}
    settings: list[type] = []
    fixed: dict[str, str] = {}
    agreed: dict[str, str] = {}
    variables: dict[str, RefusedVariable] = {}
    for schema in schemas:
        settings.extend(settings_of(schema))
        fixed.update(fixed_by(schema))
        agreed.update(agreed_in(schema))
        variables.update(refused_in(schema))
        for name, spec in schema.keys().items():
            if name in table:
                raise GraphError(f"configuration key {name} is declared twice")
            table[name] = spec
    return SchemaTable(
        types.MappingProxyType(table),
        tuple(settings),
        types.MappingProxyType(fixed),
        types.MappingProxyType(agreed),
        types.MappingProxyType(variables),
    )


def settings_of(schema: ConfigSchema) -> tuple[type, ...]:
    """Return the settings dataclasses of a schema, against which a configuration can be checked."""
    return schema.settings if isinstance(schema, SchemaTable) else ()


def fixed_by(schema: ConfigSchema) -> Mapping[str, str]:
    """Return the names that the project sets itself, each with what to do instead (see `SchemaTable.fixed`)."""
    return schema.fixed if isinstance(schema, SchemaTable) else {}


def agreed_in(schema: ConfigSchema) -> Mapping[str, str]:
    """Return the keys on which services must agree, each with the name for comparison (see `SchemaTable.agreed`)."""
    return schema.agreed if isinstance(schema, SchemaTable) else {}


def refused_in(schema: ConfigSchema) -> Mapping[str, RefusedVariable]:
    """Return the environment variables that a service with this schema must not have."""
    return schema.variables if isinstance(schema, SchemaTable) else {}


def coerce(spec: KeySpec, value: Any) -> Any:
    """Check a value, and return it. An int becomes a float where a float is expected; nothing else is converted.

    Raises ValueError with the expected kind, but not the value, which may be a secret.
    """
    if value is None and (spec.optional or spec.kind == "any"):
        return None
    if spec.kind == "float" and type(value) is int:
        value = float(value)
    if not _fits(spec.kind, value):
        raise ValueError(f"expected {spec.expected}")
    if spec.choices and not any(type(value) is type(choice) and value == choice for choice in spec.choices):
        raise ValueError(f"expected {spec.expected}")
    check_plain(value)
    return value


def check_plain(value: Any) -> None:
    """Raise ValueError unless JSON can express the value."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(f"expected text as keys of a mapping, not {key!r}")
            check_plain(item)
    elif isinstance(value, list):
        for item in value:
            check_plain(item)
    elif isinstance(value, bool | str) or value is None:
        return
    elif not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError("expected numbers, text, true, false, null, lists and mappings only")
    elif isinstance(value, int) and not -_INT64 <= value < _INT64:
        raise ValueError("expected integers of at most 64 bits")


def _fits(kind: Kind, value: Any) -> bool:
    classes: dict[str, type] = {
        "int": int,
        "float": float,
        "bool": bool,
        "str": str,
        "list": list,
        "dict": dict,
    }
    if kind == "any":
        return True
    # isinstance takes a bool for an int; here a bool is not a number.
    return isinstance(value, classes[kind]) and (kind == "bool" or not isinstance(value, bool))


def schema_of(cls: type) -> SchemaTable:
    """Return the schema of a dataclass: a key for each field, its kind from the annotation, its help from the metadata.

    Annotations may be int, float, bool, str, Path, list, tuple, dict, Mapping, Literal, Any, and any of them
    `| None`. Raises GraphError for others.
    """
    hints = get_type_hints(cls)
    keys = (_key_of(cls, field, hints[field.name]) for field in dataclasses.fields(cls) if field.init)
    return SchemaTable(types.MappingProxyType({key.name: key for key in keys}), (cls,))


def _key_of(cls: type, field: dataclasses.Field[Any], annotation: Any) -> KeySpec:
    arms = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    kinds = [arm for arm in arms if arm is not type(None)]
    name = canonical(field.name)
    if len(kinds) != 1:
        raise GraphError(f"{cls.__name__}.{field.name} has several types", "use one, or one `| None`")
    default = field.default if field.default is not dataclasses.MISSING else None
    choices = get_args(kinds[0]) if get_origin(kinds[0]) is Literal else ()
    kind = _kind_of(type(choices[0]) if choices else kinds[0])
    if kind is None:
        raise GraphError(f"{cls.__name__}.{field.name} has a type that configuration cannot express: {annotation}")
    return KeySpec(
        name=name,
        kind=kind,
        choices=choices,
        optional=len(kinds) < len(arms),
        required=not _has_default(field),
        default=default,
        help=str(field.metadata.get("help", "")),
    )


def _kind_of(annotation: Any) -> Kind | None:
    base = get_origin(annotation) or annotation
    if base is Any:
        return "any"
    if not isinstance(base, type):
        return None
    table: tuple[tuple[type, Kind], ...] = (
        (bool, "bool"),
        (int, "int"),
        (float, "float"),
        (str, "str"),
        (Path, "str"),
        (list, "list"),
        (tuple, "list"),
        (Mapping, "dict"),
    )
    return next((kind for cls, kind in table if issubclass(base, cls)), None)


def build_settings(kind: type[_T], service: str, config: Mapping[str, Any]) -> _T:
    """Build a settings dataclass from resolved configuration. Keys that it does not have are ignored.

    Raises ConfigError if a field without a default is not given, or the class refuses a value.
    """
    fields = [field for field in dataclasses.fields(kind) if field.init]  # type: ignore[arg-type]
    values = {field.name: config[name] for field in fields if (name := canonical(field.name)) in config}
    try:
        with _converting:
            return msgspec.convert(values, kind, dec_hook=_decode_path)
    except ValueError as error:  # msgspec.ValidationError is one
        raise ConfigError(f"configuration of {service}: {error}") from error


def _has_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING


def _decode_path(kind: type, value: Any) -> Any:
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise NotImplementedError(f"{kind.__name__} cannot be configured")
