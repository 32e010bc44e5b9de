"""Generators of messages, made from their types: a new field has a generator at once."""

from __future__ import annotations

import math
from importlib import import_module
from pkgutil import iter_modules
from types import UnionType
from typing import Any

import msgspec
from hypothesis import strategies as st
from msgspec import inspect

from dynamo_local.core import messages
from dynamo_local.core.codec import Message
from dynamo_local.core.messages.presence import Presence
from dynamo_local.core.messages.reports import PlannerReport
from dynamo_local.core.messages.work import Array, Logprobs

FEW = 3
text = st.text(max_size=12)
counts = st.integers(0, 2**31)
finite = st.floats(allow_nan=False, allow_infinity=False)
anything = st.none() | st.booleans() | counts | finite | text | st.lists(text, max_size=FEW)
packed = st.dictionaries(text, counts, max_size=FEW).map(lambda m: msgspec.Raw(msgspec.msgpack.encode(m)))


@st.composite
def arrays(draw: st.DrawFn, shape: tuple[int, ...] | None = None) -> Array:
    dims = draw(st.lists(st.integers(0, 4), min_size=1, max_size=3)) if shape is None else shape
    dtype = draw(st.sampled_from(["int32", "int64", "float32"]))
    size = math.prod(dims) * (8 if dtype == "int64" else 4)
    return Array(dtype, tuple(dims), draw(st.binary(min_size=size, max_size=size)))  # type: ignore[arg-type]


@st.composite
def logprobs(draw: st.DrawFn, positions: int | None = None) -> Logprobs:
    n = draw(st.integers(0, 4)) if positions is None else positions
    k = draw(st.integers(1, 3))
    return Logprobs(draw(arrays((n, k))), draw(arrays((n, k))), draw(arrays((n,))))


CHECKED: dict[type, st.SearchStrategy[Any]] = {Array: arrays(), Logprobs: logprobs()}
"""Types that refuse more than their fields' types do."""


def of(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a type, as they may come from the bus."""
    return _of(inspect.type_info(kind))


def _of(info: inspect.Type) -> st.SearchStrategy[Any]:
    match info:
        case inspect.Metadata():
            return _of(info.type)
        case inspect.UnionType():
            return st.one_of(*map(_of, info.types))
        case inspect.StructType():
            fields = {field.name: _of(field.type) for field in info.fields}
            return CHECKED[info.cls] if info.cls in CHECKED else st.builds(info.cls, **fields)
        case inspect.LiteralType():
            return st.sampled_from(info.values)
        case inspect.IntType():
            return st.integers(0 if info.ge is None else info.ge, 2**31 if info.le is None else info.le)
        case inspect.FloatType():
            return st.floats(info.ge, allow_nan=False, allow_infinity=False)
    return PLAIN[type(info)] if type(info) in PLAIN else _of_container(info)


def _of_container(info: inspect.Type) -> st.SearchStrategy[Any]:
    match info:
        case inspect.ListType():
            return st.lists(_of(info.item_type), max_size=FEW)
        case inspect.VarTupleType():
            return st.lists(_of(info.item_type), max_size=FEW).map(tuple)
        case inspect.TupleType():
            return st.tuples(*map(_of, info.item_types))
        case inspect.DictType():
            return st.dictionaries(_of(info.key_type), _of(info.value_type), max_size=FEW)
    raise NotImplementedError(f"no generator for {info}")


PLAIN: dict[type[inspect.Type], st.SearchStrategy[Any]] = {
    inspect.AnyType: anything,
    inspect.BoolType: st.booleans(),
    inspect.BytesType: st.binary(max_size=16),
    inspect.NoneType: st.none(),
    inspect.RawType: packed,
    inspect.StrType: text,
}


def _travelling() -> list[Any]:
    """Every message that travels by itself, as its receiver decodes it: alone, or as one of a union."""
    modules = (import_module(f"{messages.__name__}.{each.name}") for each in iter_modules(messages.__path__))
    values = [value for module in modules for value in vars(module).values()]
    structs = {value for value in values if isinstance(value, type) and issubclass(value, Message)} - {Message}
    unions = {value for value in values if isinstance(value, UnionType) and structs.issuperset(value.__args__)}
    alone = structs - {arm for union in unions for arm in union.__args__}
    return sorted([*unions, *alone], key=str)


BY_KIND = {kind: of(kind) for kind in _travelling()}
presences = BY_KIND[Presence]
planner_reports = BY_KIND[PlannerReport]
any_message = st.sampled_from(list(BY_KIND)).flatmap(lambda kind: st.tuples(st.just(kind), BY_KIND[kind]))
