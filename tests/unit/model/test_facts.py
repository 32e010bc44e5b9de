"""Facts read from the files of a model's folder."""

from __future__ import annotations

import ast
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, BrokenBarrierError

import pytest

from dynamo_local.core.errors import UsageError
from dynamo_local.model.facts import class_defaults, parsed, read_facts, vllm_architectures
from dynamo_local.model.weights import TruncatedWeightsError, loaded_files
from tests.unit.model.model_folders import CONFIG, WEIGHTS, model_files, safetensors, write_model


def test_a_whole_model(tmp_path: Path) -> None:
    facts = read_facts(write_model(tmp_path))
    assert (facts.architecture, facts.layers, facts.kv_heads, facts.head_dim) == ("LlamaForCausalLM", 2, 2, 16)
    assert (facts.parameters, facts.weight_bytes) == (256 * 64 + 64, len(WEIGHTS))
    assert (facts.weight_dtype, facts.dtype) == ("float32", "float32")
    assert facts.chat_template == "{{ messages }}"
    assert facts.has_tokenizer


def test_an_empty_folder_tells_nothing(tmp_path: Path) -> None:
    facts = read_facts(tmp_path)
    assert (facts.architecture, facts.parameters, facts.weight_bytes, facts.chat_template) == (None,) * 4
    assert not facts.has_tokenizer


def test_the_data_type_of_the_weights_stands_in_for_that_of_the_configuration(tmp_path: Path) -> None:
    config = {key: value for key, value in CONFIG.items() if key != "dtype"}
    assert read_facts(write_model(tmp_path, model_files(config))).dtype == "float32"


def test_shards_are_added_up_and_files_outside_of_the_index_are_left_out(tmp_path: Path) -> None:
    shard = safetensors({"a": ("BF16", [10, 4], 80)})
    index = {"metadata": {}, "weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    files = {
        "config.json": json.dumps(CONFIG).encode(),
        "model.safetensors.index.json": json.dumps(index).encode(),
        "model-1.safetensors": shard,
        "model-2.safetensors": shard,
        "duplicate.safetensors": shard,
    }
    facts = read_facts(write_model(tmp_path, files))
    assert (facts.parameters, facts.weight_bytes, facts.weight_dtype) == (80, 2 * len(shard), "bfloat16")


def test_packed_weights_have_no_known_number(tmp_path: Path) -> None:
    config = CONFIG | {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    weights = safetensors({"qweight": ("I32", [8], 32), "scales": ("F16", [2], 4)})
    facts = read_facts(write_model(tmp_path, model_files(config) | {"model.safetensors": weights}))
    assert (facts.parameters, facts.weight_bytes) == (None, len(weights))
    assert (facts.quantization, facts.quantization_bits) == ("gptq", 4)


def test_weights_of_torch_have_a_size_only(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(bytes(100))
    (tmp_path / "training_args.bin").write_bytes(bytes(7))
    facts = read_facts(tmp_path)
    assert (facts.weight_bytes, facts.parameters) == (100, None)


@pytest.mark.parametrize("kept", [0, 7, 20, len(WEIGHTS) - 1])
def test_weights_that_are_cut_off(tmp_path: Path, kept: int) -> None:
    write_model(tmp_path, model_files() | {"model.safetensors": WEIGHTS[:kept]})
    with pytest.raises(TruncatedWeightsError, match=r"model\.safetensors"):
        read_facts(tmp_path)


def test_a_pointer_of_git_lfs_is_named(tmp_path: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 10\n"
    write_model(tmp_path, model_files() | {"model.safetensors": pointer})
    with pytest.raises(TruncatedWeightsError, match="git lfs pull"):
        read_facts(tmp_path)


def test_missing_shards_are_named(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    files = model_files() | {"model.safetensors.index.json": json.dumps(index).encode()}
    with pytest.raises(UsageError, match=r"model-1\.safetensors and 1 more of the 2"):
        read_facts(write_model(tmp_path, files))


def test_a_broken_configuration(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"config\.json is no JSON object"):
        read_facts(write_model(tmp_path, model_files() | {"config.json": b"{'architectures'"}))


def test_chat_templates(tmp_path: Path) -> None:
    named = {"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]}
    write_model(tmp_path, model_files() | {"tokenizer_config.json": json.dumps(named).encode()})
    assert read_facts(tmp_path).chat_template == "d"
    (tmp_path / "chat_template.jinja").write_text("own")
    assert read_facts(tmp_path).chat_template == "own"


@pytest.mark.skipif(not class_defaults("gemma3_text"), reason="defaults are read from Transformers")
def test_defaults_of_the_class_stand_in_for_what_a_configuration_leaves_out(tmp_path: Path) -> None:
    config = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "num_hidden_layers": 34}}
    facts = read_facts(write_model(tmp_path, model_files(config)))
    assert (facts.layers, facts.heads, facts.kv_heads, facts.head_dim) == (34, 8, 4, 256)


@pytest.mark.parametrize(
    ("names", "loaded"),
    [
        ({"model.safetensors", "pytorch_model.bin"}, ("model.safetensors",)),
        ({"consolidated.safetensors", "model.safetensors"}, ("consolidated.safetensors",)),
        ({"pytorch_model.bin", "training_args.bin"}, ("pytorch_model.bin",)),
        ({"model.pt"}, ("model.pt",)),
        ({"model.gguf", "README.md"}, ()),
    ],
)
def test_files_that_vllm_loads(names: set[str], loaded: tuple[str, ...]) -> None:
    assert loaded_files(names) == loaded


needs_vllm = pytest.mark.skipif(vllm_architectures() is None, reason="vLLM is not installed")


@needs_vllm
@pytest.mark.parametrize(
    ("architecture", "pools"),
    [
        ("LlamaForCausalLM", False),
        ("LlamaModel", False),
        ("GPT2LMHeadModel", False),
        ("ChatGLMModel", False),
        ("BertModel", True),
        ("XLMRobertaForSequenceClassification", True),
        ("HF_ColBERT", True),
        ("Qwen2ForRewardModel", True),
        ("Qwen3ForSequenceClassification", True),
        ("Qwen3Model", True),
    ],
)
def test_the_architecture_tells_whether_a_model_generates(tmp_path: Path, architecture: str, pools: bool) -> None:
    facts = read_facts(write_model(tmp_path, model_files({**CONFIG, "architectures": [architecture]})))
    assert facts.pools is pools


@pytest.mark.parametrize(
    ("modules", "pools"),
    [
        (
            [{"type": "sentence_transformers.models.Transformer"}, {"type": "sentence_transformers.models.Pooling"}],
            True,
        ),
        ([{"type": "sentence_transformers.sentence_transformer.modules.pooling.Pooling"}], True),
        ([{"type": "sentence_transformers.models.Transformer"}], False),
        ([{}, 3, {"type": None}], False),
        ({"type": "x.Pooling"}, False),
    ],
)
def test_a_folder_of_sentence_transformers_pools(tmp_path: Path, modules: object, pools: bool) -> None:
    files = model_files() | {"modules.json": json.dumps(modules).encode()}
    assert read_facts(write_model(tmp_path, files)).pools is pools


def test_an_encoder_has_no_kv_cache(tmp_path: Path) -> None:
    facts = read_facts(write_model(tmp_path, model_files({**CONFIG, "model_type": "bert"})))
    assert facts.is_encoder
    assert facts.attention == ()


# Sources of vLLM and Transformers are read by threads of a server, for several endpoints at a time.


def test_no_two_threads_make_syntax_trees_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    met: list[int] = []
    both, parse = Barrier(2), ast.parse

    def watched(source: bytes) -> ast.Module:
        try:
            both.wait(0.2)
        except BrokenBarrierError:
            both.reset()
        else:
            met.append(1)
        return parse(source)

    with monkeypatch.context() as patched, ThreadPoolExecutor(2) as pool:
        patched.setattr(ast, "parse", watched)
        trees = list(pool.map(parsed, [b"a = 1\nb = 2"] * 2))
    assert [len(tree) for tree in trees] == [2, 2]
    assert met == []
