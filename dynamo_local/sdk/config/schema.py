"""Which keys a service takes, and what a value must look like.

Keys are spelled in kebab-case; underscores are accepted and mean the same.
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from dynamo_local.core.errors import ConfigError, DecodeError, GraphError

Kind = Literal["int", "float", "bool", "str", "list", "dict", "any"]

_T = TypeVar("_T")
_INT64 = 2**63


class KeySpec(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One key. `choices`, if any, are the only values allowed; `optional` allows null as well."""

    name: str
    kind: Kind = "any"
    choices: tuple[str | int | float | bool, ...] = ()
    optional: bool = False
    required: bool = False
    """There is no default."""
    default: Any = None
    """For display; what holds the default is the service itself."""
    help: str = ""

    @property
    def expected(self) -> str:
        """What a value must be, in words."""
        words = f"one of {', '.join(map(str, self.choices))}" if self.choices else self.kind
        return f"{words} or null" if self.optional else words


class ConfigSchema(Protocol):
    """Says which keys a service takes. The keys of the mapping are canonical names."""

    def keys(self) -> Mapping[str, KeySpec]: ...


@dataclasses.dataclass(frozen=True)
class SchemaTable:
    """A schema that is a table of keys. `settings` are the dataclasses that some keys were read from.

    `fixed`: names that users may know and that are no keys here, each with what to do instead.

    `agreed`: keys, and dotted paths in them, on which all services of a graph that have them must agree, each with the
    name under which it is compared.
    """

    table: Mapping[str, KeySpec]
    settings: tuple[type, ...] = ()
    fixed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    agreed: Mapping[str, str] = dataclasses.field(default_factory=dict)

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
        """Inverse of `from_json`."""
        return msgspec.json.format(msgspec.json.encode(list(self.table.values())), indent=1)


def canonical(key: str) -> str:
    """A key as it is compared and stored: kebab-case."""
    return key.replace("_", "-")


def combine(*schemas: ConfigSchema) -> SchemaTable:
    """A schema with the keys of all. A key that two of them have raises GraphError."""
    table: dict[str, KeySpec] = {}
    settings: list[type] = []
    fixed: dict[str, str] = {}
    agreed: dict[str, str] = {}
    for schema in schemas:
        settings.extend(settings_of(schema))
        fixed.update(fixed_by(schema))
        agreed.update(agreed_in(schema))
        for name, spec in schema.keys().items():
            if name in table:
                raise GraphError(f"configuration key {name} is declared twice")
            table[name] = spec
    return SchemaTable(
        types.MappingProxyType(table),
        tuple(settings),
        types.MappingProxyType(fixed),
        types.MappingProxyType(agreed),
    )


def settings_of(schema: ConfigSchema) -> tuple[type, ...]:
    """The settings dataclasses behind a schema, so that a configuration can be checked against them."""
    return schema.settings if isinstance(schema, SchemaTable) else ()


def fixed_by(schema: ConfigSchema) -> Mapping[str, str]:
    """The names that are known and no keys, each with what to do instead."""
    return schema.fixed if isinstance(schema, SchemaTable) else {}


def agreed_in(schema: ConfigSchema) -> Mapping[str, str]:
    """The keys, and paths in them, on which services must agree, each with the name under which it is compared."""
    return schema.agreed if isinstance(schema, SchemaTable) else {}


def coerce(spec: KeySpec, value: Any) -> Any:
    """The value as the key's kind: an int becomes a float where one is expected; nothing else is converted.

    Raises ValueError that says what is expected, without showing the value.
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
    """Raise ValueError unless the value is made of what JSON can carry."""
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
    # A bool is an int to isinstance, and must not pass for a number here.
    return isinstance(value, classes[kind]) and (kind == "bool" or not isinstance(value, bool))


def schema_of(cls: type) -> SchemaTable:
    """The schema of a dataclass: one key a field, kinds from annotations, help from its metadata["help"].

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
    """An instance of the settings dataclass from resolved configuration. Keys of others are passed over.

    Raises ConfigError if a field without a default is not set, or the class refuses a value.
    """
    fields = [field for field in dataclasses.fields(kind) if field.init]  # type: ignore[arg-type]
    values = {field.name: config[name] for field in fields if (name := canonical(field.name)) in config}
    try:
        return msgspec.convert(values, kind, dec_hook=_decode_path)
    except ValueError as error:  # msgspec.ValidationError is one
        raise ConfigError(f"configuration of {service}: {error}") from error


def _has_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING


def _decode_path(kind: type, value: Any) -> Any:
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise NotImplementedError(f"{kind.__name__} cannot be configured")
