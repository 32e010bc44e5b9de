from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dynamo_local.core.errors import ConfigError
from dynamo_local.engine.mocker.settings import MockerSettings
from dynamo_local.engine.vllm.arguments import engine_schema
from dynamo_local.sdk.config.schema import build_settings, combine, schema_of


def test_every_key_has_the_prefix_and_a_help_text() -> None:
    keys = schema_of(MockerSettings).keys()
    assert all(name.startswith("mocker-") and spec.help for name, spec in keys.items())
    assert keys["mocker-block-size"].default == 32


def test_a_service_can_take_the_keys_of_both_engines() -> None:
    combined = combine(engine_schema(), schema_of(MockerSettings)).keys()
    assert {"max-num-seqs", "mocker-max-num-seqs"} <= set(combined)


def test_settings_come_from_configuration() -> None:
    settings = build_settings(MockerSettings, "VllmWorker", {"mocker-kv-blocks": 7, "model": "m"})
    assert settings == MockerSettings(mocker_kv_blocks=7)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"mocker_kv_blocks": 0}, "mocker-kv-blocks must be at least 1, not 0"),
        ({"mocker_block_size": 0}, "mocker-block-size must be at least 1"),
        ({"mocker_max_num_seqs": 0}, "mocker-max-num-seqs must be at least 1"),
        ({"mocker_max_num_batched_tokens": 0}, "mocker-max-num-batched-tokens must be at least 1"),
        ({"mocker_max_model_len": 1}, "mocker-max-model-len must be at least 2"),
        ({"mocker_vocab_size": 0}, "mocker-vocab-size must be at least 1"),
        ({"mocker_vocab_size": 2**31 + 1}, "mocker-vocab-size must be at most"),
        ({"mocker_step_base_ms": -1.0}, "mocker-step-base-ms must be at least 0"),
        ({"mocker_prefill_us_per_token": -0.1}, "mocker-prefill-us-per-token must be at least 0"),
        ({"mocker_decode_us_per_seq": float("nan")}, "mocker-decode-us-per-seq must be finite"),
        ({"mocker_transfer_base_ms": -1.0}, "mocker-transfer-base-ms must be at least 0"),
        ({"mocker_transfer_us_per_block": -1.0}, "mocker-transfer-us-per-block must be at least 0"),
        ({"mocker_max_pinned_share": 1.1}, "mocker-max-pinned-share must be at most 1, not 1.1"),
        ({"mocker_longest_pin_s": 0.0}, "mocker-longest-pin-s must be above 0"),
        ({"mocker_speedup": 0.0}, "mocker-speedup must be above 0"),
        ({"mocker_speedup": float("inf")}, "mocker-speedup must be finite"),
        ({"mocker_start_s": -1.0}, "mocker-start-s must be at least 0"),
        ({"mocker_kv_blocks": 1, "mocker_block_size": 1}, "too small for a request"),
    ],
)
def test_values_that_make_no_sense_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MockerSettings(**values)


def test_a_context_is_never_longer_than_the_cache() -> None:
    settings = MockerSettings(mocker_kv_blocks=4, mocker_block_size=8, mocker_max_model_len=100)
    assert settings.context_limit == 32
    assert replace(settings, mocker_max_model_len=20).context_limit == 20


def test_time_of_a_step() -> None:
    settings = MockerSettings(
        mocker_step_base_ms=2.0,
        mocker_prefill_us_per_token=10.0,
        mocker_decode_us_per_seq=100.0,
        mocker_speedup=2.0,
    )
    assert settings.step_s(0, 0) == pytest.approx(0.001)
    assert settings.step_s(300, 10) == pytest.approx(0.003)


def test_time_of_a_read() -> None:
    settings = MockerSettings(mocker_transfer_base_ms=3.0, mocker_transfer_us_per_block=500.0, mocker_speedup=2.0)
    assert settings.transfer_s(8) == pytest.approx(0.0035)


@pytest.mark.parametrize(("share", "blocks"), [(0.0, 0), (0.5, 3), (0.99, 6), (1.0, 7)])
def test_how_much_can_be_kept_for_readers(share: float, blocks: int) -> None:
    assert MockerSettings(mocker_kv_blocks=7, mocker_max_pinned_share=share).most_leased == blocks
