"""What is wrong with a LoRA adapter, found from its files and those of its base: nothing heavy is imported.

An adapter is refused for what vLLM refuses when it loads one, and for what vLLM would load without a word and compute
wrongly: tensors that fit no module of the base, or have another shape. Whatever cannot be judged here is left to vLLM.
"""

from __future__ import annotations

import json
import math
import re
import zipfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal

from dynamo_local.core.errors import UsageError
from dynamo_local.model.weights import Tensor, files_identity, read_tensors, weight_files

CONFIG = "adapter_config.json"

_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""Files of which vLLM reads the first that is there (`vllm/lora/lora_model.py`)."""
_NEEDED = ("r", "lora_alpha", "target_modules")
_NOT_LOADED = (
    "use_dora", "lora_bias", "alora_invocation_tokens", "layer_replication", "use_bdlora", "use_qalora",
)  # fmt: skip
"""Settings that change what an adapter computes, and that vLLM does not have (`vllm/lora/peft_helper.py`)."""
_PLAIN_INITS = frozenset({"gaussian", "eva", "orthogonal", "mica", "lora_ga"})
"""Ways to begin a training that leave the base as it is."""
_HEADS = ("classifier", "score")
"""Modules that may be saved whole: the heads of models that classify."""
_PREFIX = "base_model.model."
_EXPERTS = ".experts"
"""In names of modules of which one tensor may be many, in several layouts: left to vLLM."""
_TIED = "lm_head"
"""Module that many checkpoints leave out, as it has the weights of the embedding."""
_FLOATS = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})
"""Types of weights of which each is an element of its own."""

_Part = Literal["A", "B"]
_Shape = tuple[int, ...]


class _WrongError(Exception):
    """What is wrong with an adapter, as a clause whose subject is its folder."""


@dataclass(frozen=True, eq=False)
class BaseWeights:
    """The modules with weights in a base's checkpoint, each with the shape of its weight, (outputs, inputs); None: it
    is quantized, or no matrix."""

    modules: Mapping[str, _Shape | None]

    @cached_property
    def by_tail(self) -> Mapping[str, Sequence[_Shape | None]]:
        """Shapes by the part of a module's name that does not depend on how the model is wrapped (`_tail`)."""
        found: defaultdict[str, list[_Shape | None]] = defaultdict(list)
        for name, shape in self.modules.items():
            found[_tail(name)].append(shape)
        return found

    @cached_property
    def layers(self) -> frozenset[str]:
        """The layers, each as word and number: `layers.0`."""
        return frozenset(filter(None, map(_layer, self.by_tail)))


@dataclass
class _Module:
    """What an adapter has for a module of its base."""

    shapes: dict[_Part, _Shape] = field(default_factory=dict)
    embeds: bool = False

    @property
    def of_base(self) -> _Shape | None:
        """Shape of the weight that it changes, as checkpoints have it; None if it is no plain matrix."""
        a, b = self.shapes["A"], self.shapes["B"]
        if len(a) != 2 or len(b) != 2:
            return None
        return (a[1], b[0]) if self.embeds else (b[0], a[1])


def read_base(folder: Path) -> BaseWeights | None:
    """The modules of a model in a folder; None if its files do not tell, or not by the names of Transformers. Headers
    are read again when files have changed. Blocks."""
    try:
        return _read_base(folder, files_identity(folder))
    except (OSError, UsageError):
        # What is wrong with the base is told where that is checked.
        return None


def check_adapter(name: str, folder: Path, base: BaseWeights | None = None) -> int:
    """The largest rank of the adapter in a folder. Blocks.

    Raises UsageError if there is no adapter, vLLM cannot load it, or it does not fit the base. An adapter whose files
    have not changed is not read again.
    """
    try:
        return _check(folder, files_identity(folder, strictly=True), base)
    except _WrongError as error:
        raise _refused(name, folder, str(error)) from error
    except FileNotFoundError as error:
        raise _refused(name, folder, "does not exist") from error
    except OSError as error:
        raise _refused(name, folder, f"cannot be read ({error.strerror})") from error


@lru_cache(maxsize=16)
def _read_base(folder: Path, _identity: str) -> BaseWeights | None:
    files = weight_files(folder)
    if not files or files[0].suffix != ".safetensors" or files[0].name.startswith("consolidated"):
        return None
    modules: dict[str, _Shape | None] = {}
    for file in files:
        for name, tensor in read_tensors(file).items():
            module, _, parameter = name.rpartition(".")
            is_matrix = parameter == "weight" and len(tensor.shape) == 2 and tensor.dtype in _FLOATS
            if is_matrix or module not in modules:
                modules[module] = tuple(tensor.shape) if is_matrix else None
    return BaseWeights(modules)


@lru_cache(maxsize=1024)
def _check(folder: Path, _identity: str, base: BaseWeights | None) -> int:
    config = _read_config(folder)
    _check_config(config)
    weights = next((folder / name for name in _WEIGHTS if (folder / name).is_file()), None)
    if weights is None:
        raise _WrongError(f"has none of {', '.join(_WEIGHTS)}")
    if weights.suffix == ".safetensors":
        modules = _modules_of(_tensors_of(weights), config)
        _check_ranks(modules, config)
        if base is not None:
            _check_fit(modules, base, is_turned=bool(config.get("fan_in_fan_out")))
    elif _is_cut_zip(weights):
        raise _WrongError(f"has a file {weights.name} that was not fetched or copied to the end")
    return max(int(config["r"]), *map(int, (config.get("rank_pattern") or {}).values()), 0)


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / CONFIG).read_bytes())
    except FileNotFoundError as error:
        raise _WrongError(f"has no {CONFIG}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise _WrongError(f"has no {CONFIG} that can be read") from error
    if not isinstance(config, dict):
        raise _WrongError(f"has no {CONFIG} that can be read: it is no JSON object")
    return config


def _check_config(config: Mapping[str, Any]) -> None:
    if (config.get("peft_type") or "LORA") != "LORA":
        raise _WrongError(f"has an adapter of type {_shown(config['peft_type'])}, and vLLM loads LoRA alone")
    if missing := [key for key in _NEEDED if key not in config]:
        raise _WrongError(f"has no {' and no '.join(missing)} in {CONFIG}")
    _require(_is_rank(config["r"]), "r", config["r"], "a whole number above 0")
    _require(_is_number(config["lora_alpha"]), "lora_alpha", config["lora_alpha"], "a number")
    for key, fits, wanted in (
        ("rank_pattern", _is_rank, "whole numbers above 0 by name"),
        ("alpha_pattern", _is_number, "numbers by name"),
    ):
        given = config.get(key) or {}
        fine = isinstance(given, dict) and all(_is_pattern(name) and fits(value) for name, value in given.items())
        _require(fine, key, given, wanted)
    for key in _NOT_LOADED:
        _require(not config.get(key), key, config.get(key), "absent, since vLLM does not have it")
    bias, saved, init = config.get("bias", "none"), config.get("modules_to_save"), config.get("init_lora_weights")
    _require(bias == "none", "bias", bias, '"none", since vLLM loads no biases')
    _require(
        not saved or (isinstance(saved, list) and all(module in _HEADS for module in saved)),
        *("modules_to_save", saved, f"absent or of {' and '.join(_HEADS)}: vLLM loads no other whole modules"),
    )
    _require(
        not isinstance(init, str) or init.lower() in _PLAIN_INITS,
        *("init_lora_weights", init, "another way to begin: this one has changed the weights of the base"),
    )


def _require(fine: bool, key: str, value: object, wanted: str) -> None:
    if not fine:
        raise _WrongError(f"has {key}: {_shown(value)} in {CONFIG}, which must be {wanted}")


def _is_rank(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_number(value: object) -> bool:
    return (isinstance(value, int) and not isinstance(value, bool)) or (
        isinstance(value, float) and math.isfinite(value)
    )


def _is_pattern(text: str) -> bool:
    """Whether the text is a regular expression, as which PEFT and vLLM read the names in these settings."""
    try:
        re.compile(text)
    except re.error:
        return False
    return True


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _is_cut_zip(file: Path) -> bool:
    """Whether a file of torch's begins as an archive and does not end as one."""
    with file.open("rb") as stream:
        start = stream.read(2)
    return not start or (start == b"PK" and not zipfile.is_zipfile(file))


def _tensors_of(file: Path) -> Mapping[str, Tensor]:
    try:
        tensors = read_tensors(file)
    except UsageError as error:
        raise _WrongError(f"has weights that are not whole: {error.cause}") from error
    if not tensors:
        raise _WrongError(f"has no tensors in {file.name}")
    return tensors


def _modules_of(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, _Module]:
    """The modules of the base that the tensors are for. Raises _WrongError for a tensor that is none of LoRA's."""
    modules: defaultdict[str, _Module] = defaultdict(_Module)
    for name, tensor in tensors.items():
        if name.endswith((".embed_tokens.base_layer.weight", ".lm_head.base_layer.weight")):
            continue
        if config.get("modules_to_save") and name.split(".")[-2:-1] in [[head] for head in _HEADS]:
            continue
        found = re.fullmatch(r"(.+)\.lora_(?:(A|B)\.weight|embedding_(A|B))", name)
        if found is None:
            raise _WrongError(f"has a tensor {name[:200]}, which is none of LoRA's as vLLM knows them")
        module = modules[found[1].removeprefix(_PREFIX)]
        module.shapes[found[2] or found[3]] = tuple(tensor.shape)  # type: ignore[index]  # A or B
        module.embeds = found[3] is not None
    for name, module in modules.items():
        if lacking := {"A", "B"} - module.shapes.keys():
            raise _WrongError(f"has no lora_{lacking.pop()} for the module {name}, whose other part is there")
    return dict(modules)


def _check_ranks(modules: Mapping[str, _Module], config: Mapping[str, Any]) -> None:
    for name, module in modules.items():
        a, b = module.shapes["A"], module.shapes["B"]
        if _EXPERTS in name or len(a) != 2 or len(b) != 2:
            continue
        rank = _rank_of(name, config)
        if a[0] != rank or b[1] != rank:
            raise _WrongError(
                f"has tensors of shapes {_shape(a)} and {_shape(b)} for the module {name}, whose rank is {rank} "
                f"by {CONFIG}"
            )


def _rank_of(module: str, config: Mapping[str, Any]) -> int:
    """As PEFT has it: the first pattern that is the end of the module's name counts."""
    patterns = (config.get("rank_pattern") or {}).items()
    return int(next((rank for key, rank in patterns if re.match(rf"(.*\.)?({key})$", module)), config["r"]))


def _check_fit(modules: Mapping[str, _Module], base: BaseWeights, *, is_turned: bool) -> None:
    """Raise _WrongError for modules that the base has in another shape, or has not. `is_turned`: weights of the base
    may be (inputs, outputs)."""
    plain = [name for name in modules if _EXPERTS not in name and not name.endswith(_TIED)]
    for name in plain:
        shape, there = modules[name].of_base, base.by_tail.get(_tail(name), ())
        there = (base.modules[name],) if name in base.modules else there
        if shape is not None and there and not any(_fits(shape, one, is_turned=is_turned) for one in there):
            of_base = next(one for one in there if one is not None)
            raise _WrongError(
                f"changes {name} as a weight of {_shape(shape)}, which in the base is one of {_shape(of_base)}: it was "
                "trained for another model"
            )
        layer = _layer(_tail(name))
        if layer and layer not in base.layers and _word(layer) in map(_word, base.layers):
            raise _WrongError(f"changes {name}, and the base has no {layer}: it was trained for another model")
    if plain and not any(_tail(name) in base.by_tail for name in plain):
        raise _WrongError(f"changes {plain[0]} and other modules, of which the base has none")


def _fits(shape: _Shape, of_base: _Shape | None, *, is_turned: bool) -> bool:
    return of_base is None or shape == of_base or (is_turned and shape == of_base[::-1])


def _tail(name: str) -> str:
    """A module's name from its first number on, with the word before that: `layers.0.self_attn.q_proj`."""
    parts = name.split(".")
    first = next((at for at, part in enumerate(parts) if part.isdigit()), len(parts))
    return ".".join(parts[min(max(first - 1, 0), len(parts) - 1) :])


def _layer(tail: str) -> str:
    """Word and number with which it begins; empty if it has none."""
    word, number, *_ = (*tail.split("."), "", "")
    return f"{word}.{number}" if number.isdigit() else ""


def _word(layer: str) -> str:
    return layer.partition(".")[0]


def _shape(shape: _Shape) -> str:
    return " x ".join(map(str, shape))


def _refused(name: str, folder: Path, why: str) -> UsageError:
    return UsageError(f"adapter {name}: {folder} {why}", "name a folder with a LoRA adapter, as peft writes them")
