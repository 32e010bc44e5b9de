"""The models of a graph are obtained once, and its services are given folders."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from dynamo_local.core.endpoints.checks import read_spec
from dynamo_local.core.endpoints.registry import Registry, ordered
from dynamo_local.core.endpoints.spec import AdapterRoom, EndpointSpec
from dynamo_local.core.errors import EndpointConflictError, UsageError
from dynamo_local.model.named.names import NamedModel
from dynamo_local.model.obtain import Obtained, Wish
from dynamo_local.sdk import depends, service
from dynamo_local.sdk.config.configuration import resolve
from dynamo_local.sdk.graph import build_graph
from dynamo_local.supervisor.server.launch.models import (
    ModelSource,
    with_models,
    with_rooms,
    without_downloads_for_mockers,
)
from state.devices.allocation import cpu_slots
from tests.unit import adapter_files
from tests.unit.supervisor.recording import RecordingReport


@dataclass(frozen=True)
class Engine:
    """Keys of vLLM that matter here."""

    model: str = ""
    served_model_name: list[str] | None = None
    revision: str | None = None
    load_format: str = "auto"


@dataclass(frozen=True)
class Worker(Engine):
    engine: Literal["vllm", "mocker"] = "vllm"


@dataclass(frozen=True)
class Other:
    model: str = ""


@service(config=Other)
class Stranger:
    """Knows models of its own kind."""


@service(config=Worker, role="prefill")
class Prefill:
    """A worker."""

    stranger = depends(Stranger)


@service(config=Worker, role="decode")
class Decode:
    """A worker."""

    prefill = depends(Prefill)


@service(config=Engine)
class Front:
    """The server."""

    decode = depends(Decode)


NAMED = {
    "quickstart": NamedModel(Path("/fetched"), "quickstart"),
    "random": NamedModel(Path("/made"), "random", "float32"),
}


class Obtains(ModelSource):
    """Finds every model in /there, and keeps what it was asked for."""

    def __init__(self) -> None:
        super().__init__(RecordingReport())
        self.wishes: list[Wish] = []

    def named(self, name: str) -> NamedModel:
        return NAMED[name]

    def obtain(self, wish: Wish) -> Obtained:
        self.wishes.append(wish)
        if "://" in wish.model or wish.model.startswith("/"):
            return Obtained(wish.model, wish.model)
        return Obtained("/there", wish.model, Path("/there"))


def obtained(obtains: Obtains, *overrides: str) -> dict[str, dict[str, object]]:
    graph = build_graph("m:Front", Front, ())
    resolved = with_models(graph, resolve(graph, overrides=overrides), obtains, on_cpu=True)
    return {each.name: each.config for each in resolved.services}


def everywhere(model: str, *services: str) -> list[str]:
    return [f"--{name}.model={model}" for name in services or ("Front", "Decode", "Prefill")]


def test_a_model_is_obtained_once_and_keeps_its_name() -> None:
    obtains = Obtains()
    configs = obtained(
        obtains, *everywhere("org/name"), "--Front.served-model-name=[mine]", "--Stranger.model=org/name"
    )
    assert [wish.model for wish in obtains.wishes] == ["org/name"]
    assert configs["Front"] == {"model": "/there", "served-model-name": ["mine"]}
    assert configs["Decode"] == configs["Prefill"] == {"model": "/there", "served-model-name": ["org/name"]}
    assert configs["Stranger"] == {"model": "org/name"}


def test_what_is_left_to_vllm_is_left_as_it_is() -> None:
    configs = obtained(Obtains(), *everywhere("s3://bucket/model"), "--Decode.revision=v1")
    assert configs["Decode"] == {"model": "s3://bucket/model", "revision": "v1"}
    assert configs["Front"] == {"model": "s3://bucket/model"}


def test_a_folder_has_no_revision() -> None:
    obtains = Obtains()
    configs = obtained(obtains, *everywhere("org/name"), "--Decode.revision=v1", "--Prefill.revision=v1")
    assert obtains.wishes[0].revision == "v1"
    assert "revision" not in configs["Decode"]


def test_the_devices_are_told() -> None:
    obtains = Obtains()
    obtained(obtains, *everywhere("org/name"))
    assert obtains.wishes[0].needs.on_cpu is True


def test_models_of_mockers_are_left_alone() -> None:
    obtains = Obtains()
    configs = obtained(obtains, *everywhere("org/name"), "--Decode.engine=mocker", "--Prefill.engine=mocker")
    assert not obtains.wishes
    assert configs["Front"] == {"model": "org/name"}


def test_two_models_are_both_obtained() -> None:
    obtains = Obtains()
    obtained(obtains, *everywhere("org/one", "Front", "Decode"), *everywhere("org/two", "Prefill"))
    assert sorted(wish.model for wish in obtains.wishes) == ["org/one", "org/two"]


def test_a_graph_without_models_asks_for_none() -> None:
    obtains = Obtains()
    obtained(obtains)
    assert not obtains.wishes


# Models that are given by name.


@dataclass(frozen=True)
class NamedSettings:
    model: str = ""
    served_model_name: list[str] | None = None
    dtype: str = "auto"


@service(config=NamedSettings)
class Named:
    """Takes a model and the name to serve it under."""

    plain = depends(Stranger)


def named(*overrides: str) -> dict[str, dict[str, object]]:
    """Configuration of each service after the named models were put in. Asking for another name is an error."""
    graph = build_graph("m:Named", Named, ())
    resolved = with_models(graph, resolve(graph, overrides=overrides), Obtains(), on_cpu=True)
    return {each.name: each.config for each in resolved.services}


def test_a_named_model_is_put_in_and_keeps_its_name() -> None:
    configs = named("--Named.model=quickstart", "--Stranger.model=random")
    assert configs == {
        "Named": {"model": "/fetched", "served-model-name": ["quickstart"]},
        "Stranger": {"model": "/made"},
    }


def test_a_named_model_brings_its_dtype() -> None:
    assert named("--Named.model=random")["Named"] == {
        "model": "/made",
        "served-model-name": ["random"],
        "dtype": "float32",
    }


def test_what_is_configured_stays() -> None:
    given = ("--Named.served-model-name=[mine]", "--Named.dtype=bfloat16")
    configs = named("--Named.model=random", *given, "--Stranger.model=org/model")
    assert configs == {
        "Named": {"model": "/made", "served-model-name": ["mine"], "dtype": "bfloat16"},
        "Stranger": {"model": "org/model"},
    }


def test_other_models_are_left_alone_and_none_is_made() -> None:
    assert named("--Named.model=smollm2-like")["Named"] == {"model": "smollm2-like"}


# Mockers.


def mocked(*overrides: str) -> dict[str, dict[str, object]]:
    graph = build_graph("m:Front", Front, ())
    resolved = without_downloads_for_mockers(graph, resolve(graph, overrides=overrides))
    return {each.name: each.config for each in resolved.services}


MOCKERS = ("--Decode.engine=mocker", "--Prefill.engine=mocker")


def test_mockers_serve_the_random_model_under_the_name_quickstart() -> None:
    configs = mocked(*everywhere("quickstart"), *MOCKERS, "--Decode.served-model-name=[mine]")
    assert configs["Front"] == {"model": "random", "served-model-name": ["quickstart"]}
    assert configs["Decode"] == {"model": "random", "served-model-name": ["mine"], "engine": "mocker"}


def test_quickstart_stays_where_a_worker_computes() -> None:
    configs = mocked(*everywhere("quickstart"), MOCKERS[0])
    assert {config["model"] for name, config in configs.items() if name != "Stranger"} == {"quickstart"}


def test_mockers_serve_other_models_as_they_are() -> None:
    assert mocked(*everywhere("smollm2"), *MOCKERS)["Front"] == {"model": "smollm2"}


# A server that starts has room for the adapters that are ordered, as their files ask for it.

SLOTS = cpu_slots(range(2), 2)


def adapter(root: Path, name: str, rank: int, base: str = "chat") -> EndpointSpec:
    folder = adapter_files.adapter(root / name, rank=rank)
    return read_spec({"name": name, "model": str(folder), "adapter_of": base})


def chat(**args: object) -> EndpointSpec:
    return read_spec({"name": "chat", "model": "m", "args": args})


def started(registry: Registry, specs: list[EndpointSpec], now: float) -> Registry:
    """As a server that starts has it."""
    return ordered(registry, with_rooms(specs, ordered(registry, specs, now), SLOTS), now)


def test_the_bases_of_a_file_get_room_once(tmp_path: Path) -> None:
    specs = [chat(), adapter(tmp_path, "one", 8), adapter(tmp_path, "two", 40)]
    first = started(Registry(), specs, 1.0)
    assert first.entries["chat"].spec.adapter_room == AdapterRoom(4, 64)
    assert first.entries["chat"].revision == 1
    # The next server with this file changes nothing.
    assert started(first, specs, 2.0) == first
    # Another adapter has its base changed, whether that is in the file or not.
    more = [adapter(tmp_path, "large", 100)]
    again = started(first, more, 3.0)
    assert again.entries["chat"].spec.adapter_room == AdapterRoom(4, 128)


def test_adapters_that_were_ordered_earlier_may_have_gone(tmp_path: Path) -> None:
    gone = read_spec({"name": "gone", "model": "/gone", "adapter_of": "chat"})
    registry = ordered(Registry(), [chat(), gone], 1.0)
    assert with_rooms([chat()], registry, SLOTS)[0].adapter_room == AdapterRoom(4, 16)
    with pytest.raises(UsageError, match="adapter gone: /gone does not exist"):
        with_rooms([gone], registry, SLOTS)


def test_what_the_file_says_is_not_changed(tmp_path: Path) -> None:
    specs = [chat(enable_lora=True, max_loras=1), adapter(tmp_path, "one", 8), adapter(tmp_path, "two", 8)]
    with pytest.raises(EndpointConflictError, match=r"set max-loras of chat to 2 or more$"):
        with_rooms(specs, ordered(Registry(), specs, 1.0), SLOTS)
