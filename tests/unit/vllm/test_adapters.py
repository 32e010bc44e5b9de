"""Entries of `lora-modules`, and those that are refused."""

from __future__ import annotations

from typing import Any

import pytest

from dynamo_local.core.errors import ConfigError
from dynamo_local.engine.vllm.arguments import adapter_schema, engine_schema, server_schema, to_argv
from dynamo_local.engine.vllm.settings import Adapter, AdapterSettings
from dynamo_local.sdk.config.schema import build_settings, combine

PIRATE = Adapter("pirate", "/adapters/pirate")


@pytest.mark.parametrize(
    "given",
    [
        "pirate=/adapters/pirate",
        '{"name": "pirate", "path": "/adapters/pirate"}',
        {"name": "pirate", "path": "/adapters/pirate"},
    ],
    ids=["text", "JSON", "mapping"],
)
def test_an_adapter_is_written_as_vllm_has_it_or_as_a_mapping(given: Any) -> None:
    assert build_settings(AdapterSettings, "s", {"enable-lora": True, "lora-modules": [given]}).adapters == (PIRATE,)


@pytest.mark.parametrize(
    "given",
    ["pirate", "pirate=", "=/adapters/pirate", "", 5, None, {"name": "pirate"}, {"name": "p", "path": "p", "id": 1}],
    ids=str,
)
def test_what_names_no_adapter_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match="names no adapter"):
        AdapterSettings(True, [given])


def test_names_are_given_once_and_only_with_lora_enabled() -> None:
    with pytest.raises(ConfigError, match="names pirate twice"):
        AdapterSettings(True, ["pirate=/a", "pirate=/b"])
    for enabled in (None, False):
        with pytest.raises(ConfigError, match="needs enable-lora"):
            AdapterSettings(enabled, ["pirate=/a"])
    assert AdapterSettings(True, None).adapters == AdapterSettings().adapters == ()


def test_the_key_is_one_of_its_own_and_goes_to_vllms_server() -> None:
    schema = combine(engine_schema(), server_schema(), adapter_schema())
    assert AdapterSettings in schema.settings
    assert to_argv({"lora-modules": ["pirate=/a"], "enable-lora": True}, schema) == [
        "--lora-modules",
        "pirate=/a",
        "--enable-lora",
    ]
