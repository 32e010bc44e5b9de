"""LoRA in the pinned vLLM, and the adapters' part in the KV of a request."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from dynamo_local.core.errors import EngineError, RequestError, UsageError
from dynamo_local.core.messages.work import Submit
from dynamo_local.engine.vllm.settings import Adapter
from dynamo_local.model.adapter import check_adapter
from tests.unit.adapter_files import FINE, Q_PROJ, adapter, tensors

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch
from vllm import SamplingParams
from vllm.config import CacheConfig, LoRAConfig
from vllm.lora.ops.torch_ops import bgmv_shrink
from vllm.lora.peft_helper import PEFTHelper
from vllm.v1.engine import EngineCoreRequest

from dynamo_local.engine.vllm.kv.identity import BlockHasher, fingerprints
from dynamo_local.engine.vllm.requests import wire
from dynamo_local.engine.vllm.requests.lora import NO_ADAPTERS, Adapters

TOKENS = list(range(96))
ADAPTERS = Adapters([Adapter("pirate", "/adapters/pirate"), Adapter("robot", "/adapters/robot")], enabled=True)


def work(adapter: str | None, **sampling: Any) -> Submit:
    return Submit("r", 1, "f", [1, 2], msgspec.Raw(msgspec.msgpack.encode(sampling)), adapter=adapter)


def core_request(params: SamplingParams, adapter: str | None = None) -> EngineCoreRequest:
    """Request as vLLM's server makes it, which numbers its adapters in its own way."""
    server = Adapters([Adapter("robot", "/theirs/robot"), Adapter("pirate", "/theirs/pirate")], enabled=True)
    return EngineCoreRequest("r", [1, 2], None, params, None, 1.0, server.request(adapter), None, None)


def test_no_block_of_one_adapter_is_one_of_another_or_of_none() -> None:
    hashes = BlockHasher(CacheConfig(block_size=32))
    found = [hashes(TOKENS, None, ADAPTERS.request(name)) for name in (None, "pirate", "robot")]
    elsewhere = Adapters([Adapter("pirate", "/elsewhere/pirate")]).request("pirate")
    found.append(hashes(TOKENS, None, elsewhere))
    assert len({block for blocks in found for block in blocks}) == 4 * 3
    # The number is this engine's own, and no part of them.
    turned = Adapters([Adapter("robot", "/adapters/robot"), Adapter("pirate", "/adapters/pirate")])
    assert hashes(TOKENS, None, turned.request("pirate")) == found[1]


def test_a_request_carries_the_name_and_the_worker_says_what_it_means() -> None:
    ours = wire.request_of(core_request(SamplingParams(), "pirate"), lora=True)
    assert ours.adapter == "pirate"
    there = wire.core_request_of(work(ours.adapter), adapters=ADAPTERS).lora_request
    assert there is not None
    assert (there.lora_name, there.lora_int_id, there.lora_path) == ("pirate", 1, "/adapters/pirate")
    assert wire.core_request_of(work(None), adapters=ADAPTERS).lora_request is None


@pytest.mark.parametrize("adapters", [ADAPTERS, NO_ADAPTERS], ids=["other ones", "none"])
def test_an_adapter_that_the_worker_does_not_have_is_refused(adapters: Adapters) -> None:
    with pytest.raises(RequestError, match="has no adapter 'parrot'"):
        wire.core_request_of(work("parrot"), adapters=adapters)


def test_log_probabilities_of_the_prompt_are_refused_at_both_ends() -> None:
    with pytest.raises(RequestError, match="where LoRA is enabled"):
        wire.request_of(core_request(SamplingParams(prompt_logprobs=0)), lora=True)
    with pytest.raises(RequestError, match="where LoRA is enabled"):
        wire.core_request_of(work(None, prompt_logprobs=0), adapters=ADAPTERS)
    wire.core_request_of(work(None, prompt_logprobs=0))
    wire.core_request_of(work(None, logprobs=2), adapters=ADAPTERS)


def test_kv_is_worth_as_much_as_the_adapters_files_are_the_same(tmp_path: Path) -> None:
    for name in ("pirate", "robot"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_bytes(b"1")
    config = LoRAConfig()
    adapters = Adapters([Adapter(name, str(tmp_path / name)) for name in ("pirate", "robot")], enabled=True)

    first = fingerprints({}, {}, config, adapters.requests)
    assert first.keys() == {None, "pirate", "robot"}
    assert first[None] not in (first["pirate"], first["robot"])
    # What the model computes alone, others may have that know no adapter.
    assert fingerprints({}, {}, None, ()) == {None: first[None]}
    (tmp_path / "pirate" / "weights").write_bytes(b"22")
    second = fingerprints({}, {}, config, adapters.requests)
    assert {name for name in first if first[name] != second[name]} == {"pirate"}


async def test_an_adapter_that_cannot_be_loaded_is_named() -> None:
    async def fail(request: object) -> bool:
        raise ValueError("LoRA rank 64 is greater than max_lora_rank 16")

    with pytest.raises(EngineError, match=r"the adapter pirate in /adapters/pirate cannot be loaded: LoRA rank 64"):
        await ADAPTERS.load(SimpleNamespace(add_lora_async=fail))


def test_a_configured_adapter_of_another_model_is_named(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "pirate")
    configured = Adapters([Adapter("pirate", str(folder))], enabled=True)
    configured.check("org/name")
    tensors(tmp_path / "model.safetensors", {f"model.{Q_PROJ}.weight": (64, 48)})
    with pytest.raises(EngineError, match=f"adapter pirate: {folder} changes .* one of 64 x 48"):
        configured.check(str(tmp_path))


@pytest.mark.parametrize(
    "changed",
    [
        {}, {"bias": "all"}, {"lora_alpha": None}, {"r": 0}, {"r": "8"}, {"rank_pattern": {"q_proj": 0}},
        {"use_dora": True}, {"lora_bias": True}, {"alora_invocation_tokens": [1]}, {"layer_replication": [[0, 1]]},
        {"use_bdlora": {"a": 1}}, {"use_qalora": True}, *({"modules_to_save": [head]} for head in ("lm_head", "score")),
        *({"init_lora_weights": init} for init in ("pissa", "olora", "gaussian", "eva", "mica", True)),
        {"use_rslora": True}, {"alpha_pattern": {"q_proj": 2.5}}, {"target_parameters": ["experts"]},
    ],
    ids=str,
)  # fmt: skip
def test_an_adapters_settings_are_refused_exactly_where_vllm_refuses_them(
    tmp_path: Path, changed: dict[str, Any]
) -> None:
    def taken(load: Callable[[], object], error: type[Exception]) -> bool:
        with suppress(error):
            load()
            return True
        return False

    config = {**FINE, **changed}
    folder = adapter(tmp_path / "a", config)
    by_vllm = taken(lambda: PEFTHelper.from_dict(config).validate_legal(LoRAConfig()), Exception)
    assert taken(lambda: check_adapter("a", folder), UsageError) == by_vllm


def test_vllm_reads_no_other_settings_of_an_adapter() -> None:
    """What a new one means is to be known to model/adapter.py."""
    assert {each.name for each in dataclasses.fields(PEFTHelper)} == {
        "r", "lora_alpha", "target_modules", "bias", "modules_to_save", "use_rslora", "use_dora", "lora_bias",
        "init_lora_weights", "alora_invocation_tokens", "layer_replication", "use_bdlora", "use_qalora", "rank_pattern",
        "alpha_pattern", "vllm_lora_scaling_factor", "vllm_max_position_embeddings",
    }  # fmt: skip


def test_on_a_cpu_requests_without_an_adapter_get_that_of_the_last_slot() -> None:
    # When this fails, vLLM has mended it, and Adapters.make_room can go.
    out = torch.zeros(1, 1)
    bgmv_shrink(torch.ones(1, 2), torch.stack([torch.zeros(1, 2), torch.ones(1, 2)]), out, torch.tensor([-1]))
    assert out.item() == 2.0


@pytest.mark.parametrize(("loras", "cpu_loras", "room"), [(1, None, (3, None)), (2, 2, (3, 3)), (8, 9, (8, 9))])
def test_so_it_is_left_empty(loras: int, cpu_loras: int | None, room: tuple[int, int | None]) -> None:
    args = SimpleNamespace(max_loras=loras, max_cpu_loras=cpu_loras)
    ADAPTERS.make_room(args)
    assert (args.max_loras, args.max_cpu_loras) == room
