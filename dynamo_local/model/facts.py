"""Reads the figures of a model from the files in its folder, in milliseconds: no weight is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from dynamo_local.core.errors import UsageError
from dynamo_local.core.sizing.architecture import architecture_facts
from dynamo_local.core.sizing.model_facts import ModelFacts
from dynamo_local.core.sizing.pooling import pools_by_name
from dynamo_local.model.defaults import with_defaults
from dynamo_local.model.known import known_model_types, vllm_architectures, vllm_pooling
from dynamo_local.model.weights import weight_facts, weight_files

CONFIG = "config.json"
MISTRAL_CONFIG = "params.json"
"""The configuration of a model in Mistral's own format, which vLLM loads as well."""

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt", "spiece.model",
    "sentencepiece.bpe.model", "tekken.json", "tiktoken.model",
)  # fmt: skip
"""Files of which a model with a tokenizer has one at least."""

_MODULES = "modules.json"
_TEMPLATE = "chat_template.jinja"
_OLD_TEMPLATE = "chat_template.json"


def read_facts(folder: Path) -> ModelFacts:
    """Figures of the model in a folder. Raises UsageError if config.json is broken or weights are not whole, and
    OSError if the folder cannot be read. Whatever is missing is None."""
    facts = read_config_facts(folder)
    weights = weight_facts(weight_files(folder), facts.quantization is not None)
    if weights is None:
        return facts
    return replace(
        facts,
        parameters=weights.parameters,
        weight_bytes=weights.bytes,
        weight_dtype=weights.dtype,
        dtype=facts.dtype or weights.dtype,
    )


def read_config_facts(folder: Path) -> ModelFacts:
    """The facts that do not need the weights: configuration, tokenizer, chat template. Errors as for `read_facts`."""
    facts = architecture_facts(with_defaults(read_config(folder)))
    return replace(
        facts,
        needs_remote_code=facts.needs_remote_code and facts.model_type not in (known_model_types() or ()),
        chat_template=_chat_template(folder),
        has_tokenizer=any((folder / name).is_file() for name in TOKENIZER_FILES),
        pools=_is_sentence_transformer(folder)
        or pools_by_name(facts.architecture, vllm_pooling() or (), vllm_architectures() or ()),
    )


def read_config(folder: Path) -> dict[str, Any]:
    """The content of config.json; empty if there is none. Raises UsageError if it is no JSON object."""
    return _json_object(folder / CONFIG)


def _json_object(path: Path) -> dict[str, Any]:
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return {}
    try:
        return msgspec.json.decode(raw, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is no JSON object ({error})", "fetch the file again, or mend it") from error


def _is_sentence_transformer(folder: Path) -> bool:
    """Whether the folder is of the library Sentence Transformers, and pools: that makes a pooling model of any."""
    try:
        modules = msgspec.json.decode((folder / _MODULES).read_bytes())
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return False
    kinds = [module.get("type") for module in modules if isinstance(module, dict)] if isinstance(modules, list) else []
    return any(isinstance(kind, str) and kind.endswith(".Pooling") for kind in kinds)


def _chat_template(folder: Path) -> str | None:
    """The template: of its own file, else of the tokenizer's configuration, as Transformers looks for it."""
    own = folder / _TEMPLATE
    if own.is_file():
        return own.read_text(encoding="utf-8", errors="replace")
    for name in (_OLD_TEMPLATE, "tokenizer_config.json"):
        template = _default_template(_json_object(folder / name).get("chat_template"))
        if template is not None:
            return template
    return None


def _default_template(value: object) -> str | None:
    """Return the chat template; of a list of named templates, the one that is called "default"."""
    if isinstance(value, list):
        named = [entry for entry in value if isinstance(entry, Mapping) and entry.get("name") == "default"]
        value = named[0].get("template") if named else None
    return value if isinstance(value, str) and value else None
