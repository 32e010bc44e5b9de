"""Reads the figures of a model from the files in its folder, in milliseconds: no weight is read."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from importlib import util
from pathlib import Path
from typing import Any

import msgspec

from dynamo_local.core.errors import UsageError
from dynamo_local.core.sizing.architecture import architecture_facts, language_part
from dynamo_local.core.sizing.model_facts import ModelFacts
from dynamo_local.core.sizing.pooling import pools_by_name
from dynamo_local.model.known import known_model_types, parsed, vllm_architectures, vllm_pooling
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


# Settings that a config.json leaves out because they are the defaults of its class in Transformers.
# The configuration of Gemma 3, for example, leaves out the number of heads. The defaults are read from the source of
# the installed Transformers, since importing the library takes seconds.

_READ = ("num_hidden_layers", "num_attention_heads", "hidden_size", "max_position_embeddings")
"""Without these a configuration is taken to rely on defaults. Settings that are left out on purpose, such as
num_key_value_heads, are then taken from them as well."""
_TAKEN = (*_READ, "num_key_value_heads", "head_dim", "sliding_window", "vocab_size")
_SUFFIXES = ("", "_text", "_moe_text", "_language")


def with_defaults(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with what its language part leaves to the defaults of its class. Unchanged where the class is
    unknown, or Transformers is not installed."""
    text = language_part(config)
    model_type = text.get("model_type")
    if not isinstance(model_type, str) or all(key in text for key in _READ):
        return config
    defaults = class_defaults(model_type)
    missing = {key: defaults[key] for key in _TAKEN if key not in text and key in defaults}
    return _replaced(config, text, {**text, **missing})


def _replaced(config: dict[str, Any], part: Mapping[str, Any], by: dict[str, Any]) -> dict[str, Any]:
    """The configuration with one of its parts, which may be the whole, replaced."""
    if config is part:
        return by
    return {key: _replaced(value, part, by) if isinstance(value, dict) else value for key, value in config.items()}


@cache
def class_defaults(model_type: str) -> Mapping[str, Any]:
    """Plain defaults of the configuration class with that `model_type`; none where it is not found."""
    for file in _sources(model_type):
        for node in parsed(file.read_bytes()):
            if isinstance(node, ast.ClassDef):
                values = dict(_plain_fields(node))
                if values.get("model_type") == model_type:
                    return values
    return {}


def _sources(model_type: str) -> Iterator[Path]:
    spec = util.find_spec("transformers")
    if spec is None or spec.origin is None or not model_type.isidentifier():
        return
    for suffix in _SUFFIXES:
        name = model_type.removesuffix(suffix)
        file = Path(spec.origin).parent / "models" / name / f"configuration_{name}.py"
        if file.is_file():
            yield file


def _plain_fields(node: ast.ClassDef) -> Iterator[tuple[str, Any]]:
    for statement in node.body:
        value = statement.value if isinstance(statement, ast.Assign | ast.AnnAssign) else None
        target = statement.target if isinstance(statement, ast.AnnAssign) else None
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target = statement.targets[0] if isinstance(statement.targets[0], ast.Name) else None
        if isinstance(target, ast.Name) and isinstance(value, ast.Constant):
            yield target.id, value.value
