"""What is wrong with a model, found from its files in a fraction of a second: nothing heavy is imported.

Whatever cannot be judged here is left to vLLM. Each error has one line with the cause and the remedy.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamo_local.core.errors import UsageError
from dynamo_local.core.sizing.architecture import architectures
from dynamo_local.core.sizing.model_facts import ModelFacts
from dynamo_local.model.adapter import CONFIG as ADAPTER_CONFIG
from dynamo_local.model.facts import (
    CONFIG,
    MISTRAL_CONFIG,
    has_plugins,
    read_config,
    read_config_facts,
    read_facts,
    transformers_architectures,
    vllm_architectures,
    vllm_moved,
    vllm_quantizations,
    vllm_retired,
)

_CACHE_PREFIX = "models--"
_NOT_ON_CPU = frozenset({"modelopt_fp4", "modelopt_mxfp8", "mxfp8", "fp_quant", "humming"})
"""Methods for which vLLM has kernels for GPUs only (`vllm.model_executor.kernels.linear`)."""


@dataclass(frozen=True)
class Needs:
    """What a model is to be loaded for.

    `weights`, `tokenizer`: whether the folder must have them. `on_cpu`: whether the devices are CPUs; None if unknown.
    `plain_architecture`: False if the user replaced settings of config.json, so that they do not count.
    """

    weights: bool = True
    tokenizer: bool = True
    trust_remote_code: bool = False
    on_cpu: bool | None = None
    plain_architecture: bool = True


def check_model(folder: Path, needs: Needs) -> ModelFacts:
    """The facts of the model in a folder. Raises UsageError if it is none, or if vLLM could not load it."""
    check_is_model(folder)
    facts = check_config(folder, needs, str(folder))
    if needs.weights:
        facts = read_facts(folder)
        if facts.weight_bytes is None:
            raise UsageError(f"{folder} holds no weights", _without_weights(folder))
    return facts


def check_is_model(folder: Path) -> None:
    """Raises UsageError unless the path is a folder with a model's configuration."""
    try:
        if folder.is_file():
            raise _file_given(folder)
        if not folder.is_dir():
            raise _folder_missing(folder)
        names = {path.name for path in folder.iterdir()}
    except OSError as error:
        raise UsageError(f"{folder} cannot be read ({error.strerror})", "check its permissions") from error
    if names.isdisjoint((CONFIG, MISTRAL_CONFIG)):
        raise _no_model(folder, names)


def check_config(folder: Path, needs: Needs, model: str) -> ModelFacts:
    """The facts that do not need the weights. Raises UsageError if vLLM could not load the model `model`, as far as
    its configuration and tokenizer tell."""
    config = read_config(folder)
    facts = read_config_facts(folder)
    if config and needs.plain_architecture:
        _check_architecture(config, facts, model)
    if facts.needs_remote_code and not needs.trust_remote_code:
        raise UsageError(
            f"{model} is loaded by Python code of its own, which is not run unless you trust it",
            "read the code, then set trust-remote-code",
        )
    _check_quantization(facts, needs, model)
    if needs.tokenizer and not facts.has_tokenizer:
        raise UsageError(
            f"{model} has no tokenizer", "copy tokenizer.json and tokenizer_config.json to it, or set tokenizer"
        )
    return facts


def _check_architecture(config: Mapping[str, Any], facts: ModelFacts, model: str) -> None:
    names = architectures(config)
    supported = vllm_architectures()
    if supported is None or has_plugins() or config.get("auto_map"):
        return
    if not names:
        if facts.model_type is None:
            raise UsageError(f"config.json of {model} names no architecture", "fetch the model again")
        return  # vLLM derives it from the model's type
    loadable = supported | ((transformers_architectures() or frozenset()) - vllm_moved().keys())
    if loadable.isdisjoint(names) and not any(_converted(name, supported) for name in names):
        raise UsageError(f"vLLM has no code for the architecture {names[0]} of {model}", _other_way(names[0], loadable))


def _converted(name: str, supported: frozenset[str]) -> bool:
    """Whether vLLM turns a model for generation of that family into one for this task, such as classification."""
    return any(
        name.endswith(suffix) and f"{name.removesuffix(suffix)}{base}" in supported
        for suffix in ("ForSequenceClassification", "ForTokenClassification", "RewardModel", "EmbeddingModel", "Model")
        for base in ("ForCausalLM", "ForConditionalGeneration", "Model")
    )


def _other_way(name: str, loadable: frozenset[str]) -> str:
    if name in vllm_retired():
        return f"vLLM had it until version {vllm_retired()[name]}: choose another model"
    if name in vllm_moved():
        return f"install the plugin of vLLM at {vllm_moved()[name]}"
    close = difflib.get_close_matches(name, sorted(loadable), n=1, cutoff=0.8)
    return f"did you mean {close[0]}?" if close else "choose another model, or install a plugin of vLLM for it"


def _check_quantization(facts: ModelFacts, needs: Needs, model: str) -> None:
    method, methods = facts.quantization, vllm_quantizations()
    if method is None:
        return
    if methods is not None and method not in methods and not has_plugins():
        raise UsageError(
            f"the weights of {model} are quantized by {method!r}, which vLLM does not load",
            "choose another version of the model, such as one with fp8, awq or gptq",
        )
    if needs.on_cpu and method in _NOT_ON_CPU:
        raise UsageError(
            f"the weights of {model} are quantized by {method!r}, which vLLM loads on GPUs only",
            "choose another version of the model, such as one in bfloat16",
        )


def _file_given(file: Path) -> UsageError:
    if file.suffix.lower() == ".gguf":
        return _gguf(file)
    if (file.parent / CONFIG).is_file():
        return UsageError(f"{file} is a file of a model", f"name its folder: {file.parent}")
    return UsageError(f"{file} is a file", "name the folder of a model, or its id on the Hugging Face Hub")


def _gguf(path: Path) -> UsageError:
    return UsageError(
        f"{path} is in the format GGUF, which vLLM does not load",
        "serve the model that it was made from: a folder with config.json and safetensors, or its id",
    )


def _folder_missing(folder: Path) -> UsageError:
    siblings = _names_in(folder.parent)
    close = difflib.get_close_matches(folder.name, siblings, n=1)
    if close:
        return UsageError(f"there is no folder {folder}", f"did you mean {folder.parent / close[0]}?")
    return UsageError(
        f"there is no folder {folder}", "check the path; a model of the Hugging Face Hub is written ORG/NAME"
    )


def _names_in(folder: Path) -> list[str]:
    try:
        return sorted(path.name for path in folder.iterdir() if path.is_dir())
    except OSError:
        return []


def _no_model(folder: Path, names: set[str]) -> UsageError:
    gguf = sorted(name for name in names if name.lower().endswith(".gguf"))
    if gguf:
        return _gguf(folder / gguf[0])
    if ADAPTER_CONFIG in names:
        return UsageError(
            f"{folder} is a LoRA adapter, not a model", "serve its base model, and name it by lora-modules"
        )
    if folder.name.startswith(_CACHE_PREFIX):
        hub_id = folder.name.removeprefix(_CACHE_PREFIX).replace("--", "/")
        return UsageError(f"{folder} belongs to the cache of the Hugging Face Hub", f"write the model's id: {hub_id}")
    inside = [name for name in _names_in(folder) if (folder / name / CONFIG).is_file()]
    if inside:
        return UsageError(f"{folder} holds no {CONFIG}", f"did you mean {folder / inside[0]}?")
    return UsageError(f"{folder} holds no {CONFIG}: it is no model's folder", "name the folder that holds it")


def _without_weights(folder: Path) -> str:
    if any(path.suffix.lower() == ".gguf" for path in folder.iterdir()):
        return "its file in the format GGUF is not loaded by vLLM: fetch the files *.safetensors"
    return "fetch its files *.safetensors"
