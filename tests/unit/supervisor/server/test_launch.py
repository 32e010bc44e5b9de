from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from dynamo_local.bus.nats import BusAddress
from dynamo_local.core.errors import UsageError
from dynamo_local.sdk import depends, service
from dynamo_local.sdk.config.configuration import resolve
from dynamo_local.sdk.graph import build_graph
from dynamo_local.supervisor.server.launch import external_bus, shown_url, uses_quickstart, with_quickstart


@dataclass(frozen=True)
class PlainSettings:
    model: str = ""


@dataclass(frozen=True)
class NamedSettings:
    model: str = ""
    served_model_name: list[str] | None = None


@service(config=PlainSettings)
class Plain:
    """Takes a model."""


@service(config=NamedSettings)
class Named:
    """Takes a model and the name to serve it under."""

    plain = depends(Plain)


def quickstarted(*overrides: str) -> dict[str, dict[str, object]]:
    """Configuration of each service after the quick start's model was put in."""
    graph = build_graph("m:Named", Named, ())
    resolved = with_quickstart(graph, resolve(graph, overrides=overrides), Path("/made/here"))
    return {each.name: each.config for each in resolved.services}


def test_the_quick_start_model_is_put_in_and_keeps_its_name() -> None:
    configs = quickstarted("--Named.model=quickstart", "--Plain.model=quickstart")
    assert configs == {
        "Named": {"model": "/made/here", "served-model-name": ["quickstart"]},
        "Plain": {"model": "/made/here"},
    }


def test_other_models_and_other_names_are_left_alone() -> None:
    configs = quickstarted("--Named.model=quickstart", "--Named.served-model-name=[mine]", "--Plain.model=org/model")
    assert configs == {
        "Named": {"model": "/made/here", "served-model-name": ["mine"]},
        "Plain": {"model": "org/model"},
    }


def test_the_quick_start_model_is_made_only_when_it_is_named() -> None:
    graph = build_graph("m:Named", Named, ())
    assert not uses_quickstart(resolve(graph, overrides=["--Named.model=quickstarter"]))
    assert uses_quickstart(resolve(graph, overrides=["--Plain.model=quickstart"]))


@pytest.mark.parametrize(
    ("url", "environ", "expected"),
    [
        (None, {}, None),
        (None, {"NATS_SERVER": ""}, None),
        ("nats://host:4333", {}, BusAddress("nats://host:4333")),
        ("host", {}, BusAddress("nats://host")),
        (None, {"NATS_SERVER": "nats://host:1"}, BusAddress("nats://host:1")),
        ("nats://typed:1", {"NATS_SERVER": "nats://environment:1"}, BusAddress("nats://typed:1")),
        ("nats://host:1", {"NATS_TOKEN": "t"}, BusAddress("nats://host:1", "t")),
        ("nats://s3c%2Fret@host", {"NATS_TOKEN": "other"}, BusAddress("nats://host:4222", "s3c/ret")),
        ("tls://t@[::1]:5", {}, BusAddress("tls://[::1]:5", "t")),
        ("nats://user:pass@host:1", {}, BusAddress("nats://user:pass@host:1")),
    ],
)
def test_an_existing_server_is_found_with_its_secret(
    url: str | None, environ: dict[str, str], expected: BusAddress | None
) -> None:
    assert external_bus(url, environ) == expected


@pytest.mark.parametrize("url", ["http://host", "nats://", "nats://host:port", "nats://secret@host:99999"])
def test_what_is_no_address_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        external_bus(url, {})
    assert "secret" not in str(caught.value)


def test_a_shown_address_has_no_secret() -> None:
    assert shown_url(BusAddress("nats://user:p@ss@host:1")) == "nats://host:1"
