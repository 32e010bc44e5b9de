"""Each mistake with a model: what is said of it, before anything heavy is imported."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dynamo_local.core.errors import UsageError
from dynamo_local.model.check import Needs, check_model
from dynamo_local.model.facts import vllm_architectures
from tests.unit.model.model_folders import CONFIG, WEIGHTS, model_files, write_model

needs_vllm = pytest.mark.skipif(vllm_architectures() is None, reason="vLLM is not installed")


def with_config(**changes: object) -> Callable[[Path], Path]:
    return lambda folder: write_model(folder, model_files(CONFIG | changes))


def with_files(**content: bytes | None) -> Callable[[Path], Path]:
    """A whole model with files changed, or left out where the content is None. `__` stands for the dot."""
    changes = {name.replace("__", "."): value for name, value in content.items()}

    def write(folder: Path) -> Path:
        files = {name: value for name, value in (model_files() | changes).items() if value is not None}
        return write_model(folder, files)

    return write


def gguf_file(folder: Path) -> Path:
    write_model(folder, {"model.gguf": b"GGUF"})
    return folder / "model.gguf"


def weights_file(folder: Path) -> Path:
    return write_model(folder) / "model.safetensors"


def misspelt(folder: Path) -> Path:
    write_model(folder / "Qwen3-0.6B")
    return folder / "Qwen3-06B"


def nested(folder: Path) -> Path:
    write_model(folder / "snapshot")
    return folder


MISTAKES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "no folder": (lambda folder: folder / "none", r"there is no folder .*/none; check the path"),
    "misspelt": (misspelt, r"there is no folder .*; did you mean .*/Qwen3-0.6B\?"),
    "empty folder": (lambda folder: write_model(folder, {}), r"holds no config.json: it is no model's folder"),
    "folder around the model": (nested, r"holds no config.json; did you mean .*/snapshot\?"),
    "folder of the cache": (
        lambda folder: write_model(folder / "models--org--name", {}),
        r"belongs to the cache .*; write the model's id: org/name",
    ),
    "adapter": (lambda folder: write_model(folder, {"adapter_config.json": b"{}"}), r"is a LoRA adapter, not a model"),
    "GGUF file": (gguf_file, r"model.gguf is in the format GGUF, which vLLM does not load; serve the model"),
    "folder of GGUF": (lambda folder: gguf_file(folder).parent, r"is in the format GGUF"),
    "file of weights": (weights_file, r"is a file of a model; name its folder: "),
    "broken configuration": (with_files(config__json=b"{"), r"config.json is no JSON object"),
    "configuration is a list": (with_files(config__json=b"[]"), r"config.json is no JSON object"),
    "no weights": (with_files(model__safetensors=None), r"holds no weights; fetch its files \*.safetensors"),
    "weights cut off": (
        with_files(model__safetensors=WEIGHTS[:-1]),
        r"has [\d,]+ bytes, and its header says [\d,]+: it was not fetched or copied to the end",
    ),
    "no tokenizer": (with_files(tokenizer__json=None, tokenizer_config__json=None), r"has no tokenizer; copy"),
    "code of its own": (
        with_config(model_type="own", auto_map={"AutoConfig": "configuration_own.OwnConfig"}),
        r"loaded by Python code of its own.*; .*set trust-remote-code",
    ),
}

OF_VLLM: dict[str, tuple[Callable[[Path], Path], str]] = {
    "no architecture": (with_config(architectures=[], model_type=None), r"names no architecture"),
    "unknown architecture": (with_config(architectures=["OwnForCausalLM"]), r"no code for the architecture OwnForCaus"),
    "misspelt architecture": (
        with_config(architectures=["LlamaForCausaLM"]),
        r"no code for the architecture LlamaForCausaLM .*; did you mean LlamaForCausalLM\?",
    ),
    "retired architecture": (with_config(architectures=["XverseForCausalLM"]), r"vLLM had it until version 0\.23"),
    "architecture of a plugin": (with_config(architectures=["BartModel"]), r"install the plugin of vLLM at https://"),
    "unknown quantization": (
        with_config(quantization_config={"quant_method": "bitsandbytes"}),
        r"quantized by 'bitsandbytes', which vLLM does not load",
    ),
    "quantization of GPUs": (
        with_config(quantization_config={"quant_method": "humming"}),
        r"quantized by 'humming', which vLLM loads on GPUs only",
    ),
}


def refused(folder: Path) -> str:
    with pytest.raises(UsageError) as caught:
        check_model(folder, Needs(on_cpu=True))
    assert caught.value.remedy
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(tmp_path: Path, name: str) -> None:
    make, said = MISTAKES[name]
    assert re.search(said, refused(make(tmp_path)))


@needs_vllm
@pytest.mark.parametrize("name", OF_VLLM)
def test_mistakes_that_need_to_know_vllm(tmp_path: Path, name: str) -> None:
    make, said = OF_VLLM[name]
    assert re.search(said, refused(make(tmp_path)))


def test_a_whole_model_passes(tmp_path: Path) -> None:
    facts = check_model(write_model(tmp_path), Needs(on_cpu=True))
    assert facts.weight_bytes == len(WEIGHTS)


ALLOWED: dict[str, tuple[Callable[[Path], Path], Needs]] = {
    "weights made up": (with_files(model__safetensors=None), Needs(weights=False)),
    "tokenizer from elsewhere": (with_files(tokenizer__json=None, tokenizer_config__json=None), Needs(tokenizer=False)),
    "trusted code": (
        with_config(model_type="own", architectures=["Own"], auto_map={"AutoConfig": "c.C", "AutoModel": "m.M"}),
        Needs(trust_remote_code=True),
    ),
    "code that is not needed": (with_config(auto_map={"AutoConfig": "configuration_llama.LlamaConfig"}), Needs()),
    "settings replaced by the user": (with_config(architectures=["Own"]), Needs(plain_architecture=False)),
    "of Transformers alone": (with_config(architectures=["XGLMForCausalLM"]), Needs()),
    "for classification": (with_config(architectures=["LlamaForTokenClassification"]), Needs()),
    "quantization for GPUs": (with_config(quantization_config={"quant_method": "humming"}), Needs(on_cpu=False)),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_what_vllm_may_load_passes(tmp_path: Path, name: str) -> None:
    make, needs = ALLOWED[name]
    check_model(make(tmp_path), needs)


def test_nothing_heavy_is_imported(tmp_path: Path) -> None:
    write_model(tmp_path)
    code = (
        "import sys, pathlib; from dynamo_local.model.check import Needs, check_model;"
        f"check_model(pathlib.Path({str(tmp_path)!r}), Needs());"
        "print(sorted({'torch', 'vllm', 'transformers', 'numpy', 'huggingface_hub'} & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert shown.stdout == "[]\n"
