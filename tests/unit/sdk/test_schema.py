from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.errors import ConfigError, DecodeError, GraphError
from dynamo_local.sdk import KeySpec, SchemaTable, combine, schema_of, service
from dynamo_local.sdk.config.configuration import resolve
from dynamo_local.sdk.config.schema import build_settings, coerce
from dynamo_local.sdk.graph import build_graph

from .graphs.services import WorkerConfig


@dataclass(frozen=True)
class Everything:
    needed: int
    path: Path = Path("x")
    level: Literal[1, 2] = 1
    table: dict[str, int] | None = None
    free: Any = None
    port: int = field(default=1, metadata={"help": "where it listens"})

    def __post_init__(self) -> None:
        if self.port > 65535:
            raise ValueError("port is above 65535")


def test_a_dataclass_becomes_a_schema() -> None:
    assert dict(schema_of(Everything).keys()) == {
        "needed": KeySpec("needed", "int", required=True),
        "path": KeySpec("path", "str", default=Path("x")),
        "level": KeySpec("level", "int", (1, 2), default=1),
        "table": KeySpec("table", "dict", optional=True),
        "free": KeySpec("free", "any"),
        "port": KeySpec("port", "int", default=1, help="where it listens"),
    }
    assert schema_of(WorkerConfig).keys()["stop"] == KeySpec("stop", "list", default=())


def test_settings_are_typed() -> None:
    made = build_settings(Everything, "S", {"needed": 1, "path": "a/b", "of-others": 2})
    assert made == Everything(needed=1, path=Path("a/b"))
    assert build_settings(WorkerConfig, "S", {"stop": ["a"]}).stop == ("a",)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "configuration of S: .*needed"),
        ({"needed": 1, "port": 70000}, "configuration of S: port is above 65535"),
        ({"needed": 1, "table": {"a": "x"}}, r"configuration of S: Expected `int`, got `str`"),
    ],
)
def test_settings_that_the_class_refuses(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_settings(Everything, "S", config)


def test_an_annotation_that_configuration_cannot_express() -> None:
    @dataclass
    class Odd:
        value: complex

    @dataclass
    class Several:
        value: int | str

    with pytest.raises(GraphError, match=r"Odd\.value has a type that configuration cannot express"):
        schema_of(Odd)
    with pytest.raises(GraphError, match=r"Several\.value has several types"):
        schema_of(Several)


def test_schemas_combine_unless_they_clash() -> None:
    one, two = SchemaTable.of(KeySpec("a")), SchemaTable.of(KeySpec("b"))
    assert set(combine(one, two).keys()) == {"a", "b"}
    with pytest.raises(GraphError, match="configuration key a is declared twice"):
        combine(one, two, one)


kinds = st.sampled_from(["int", "float", "bool", "str", "list", "dict", "any"])
specs = st.builds(KeySpec, st.from_regex(r"[a-z](-?[a-z])*", fullmatch=True), kinds, optional=st.booleans())


@given(st.lists(specs, unique_by=lambda spec: spec.name))
def test_a_table_survives_json(keys: list[KeySpec]) -> None:
    table = SchemaTable.of(*keys)
    assert SchemaTable.from_json(table.to_json()).keys() == table.keys()


def test_a_table_that_is_not_one() -> None:
    with pytest.raises(DecodeError, match="not a list of configuration keys"):
        SchemaTable.from_json(b'[{"nme": "a"}]')


examples: dict[str, Any] = {"int": 1, "float": 1.5, "bool": True, "str": "x", "list": [1], "dict": {"a": 1}}


@pytest.mark.parametrize("kind", examples)
@pytest.mark.parametrize("given_kind", [*examples, "null"])
def test_only_values_of_the_kind_pass_and_ints_as_floats(kind: Any, given_kind: str) -> None:
    value = examples.get(given_kind)
    spec = KeySpec("k", kind)
    if given_kind == kind:
        assert coerce(spec, value) == value
    elif (kind, given_kind) == ("float", "int"):
        assert type(coerce(spec, value)) is float
    else:
        with pytest.raises(ValueError, match=f"expected {kind}"):
            coerce(spec, value)
    assert coerce(KeySpec("k", kind, optional=True), None) is None
    assert coerce(KeySpec("k", "any"), value) == value


def test_a_configuration_is_checked_against_every_settings_class_behind_its_schema() -> None:
    @service(config=combine(schema_of(Everything), SchemaTable.of(KeySpec("more", "int"))))
    class Checked:
        pass

    Checked.__qualname__ = "Checked"  # as if it stood at the top of this module
    graph = build_graph("m:Checked", Checked, ())
    assert resolve(graph, overrides=["--Checked.needed=1", "--Checked.more=2"]).root.config == {
        "needed": 1,
        "more": 2,
    }
    with pytest.raises(ConfigError, match="configuration of Checked: port is above 65535"):
        resolve(graph, overrides=["--Checked.needed=1", "--Checked.port=70000"])
