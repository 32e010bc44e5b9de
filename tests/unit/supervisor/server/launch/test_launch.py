from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dynamo_local.model.named.names import NamedModel
from dynamo_local.sdk import depends, service
from dynamo_local.sdk.config.configuration import resolve
from dynamo_local.sdk.graph import build_graph
from dynamo_local.supervisor.server.launch.prepare import with_named_models


@dataclass(frozen=True)
class PlainSettings:
    model: str = ""


@dataclass(frozen=True)
class NamedSettings:
    model: str = ""
    served_model_name: list[str] | None = None
    dtype: str = "auto"


@service(config=PlainSettings)
class Plain:
    """Takes a model."""


@service(config=NamedSettings)
class Named:
    """Takes a model and the name to serve it under."""

    plain = depends(Plain)


MODELS = {
    "quickstart": NamedModel(Path("/fetched"), "quickstart"),
    "random": NamedModel(Path("/made"), "random", "float32"),
}


def with_models(*overrides: str) -> dict[str, dict[str, object]]:
    """Configuration of each service after the named models were put in. Asking for another name is an error."""
    graph = build_graph("m:Named", Named, ())
    resolved = with_named_models(graph, resolve(graph, overrides=overrides), MODELS.__getitem__)
    return {each.name: each.config for each in resolved.services}


def test_a_named_model_is_put_in_and_keeps_its_name() -> None:
    configs = with_models("--Named.model=quickstart", "--Plain.model=random")
    assert configs == {
        "Named": {"model": "/fetched", "served-model-name": ["quickstart"]},
        "Plain": {"model": "/made"},
    }


def test_a_named_model_brings_its_dtype() -> None:
    assert with_models("--Named.model=random")["Named"] == {
        "model": "/made",
        "served-model-name": ["random"],
        "dtype": "float32",
    }


def test_what_is_configured_stays() -> None:
    given = ("--Named.served-model-name=[mine]", "--Named.dtype=bfloat16")
    configs = with_models("--Named.model=random", *given, "--Plain.model=org/model")
    assert configs == {
        "Named": {"model": "/made", "served-model-name": ["mine"], "dtype": "bfloat16"},
        "Plain": {"model": "org/model"},
    }


def test_other_models_are_left_alone_and_none_is_made() -> None:
    assert with_models("--Named.model=smollm2-like")["Named"] == {"model": "smollm2-like"}
