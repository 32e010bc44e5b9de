"""What is known of a model before it is loaded: the figures in its files, and what the installed vLLM and Transformers
make of them."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from importlib import metadata, util
from pathlib import Path
from threading import Lock
from typing import Any

import msgspec

from dynamo_local.core.errors import UsageError
from dynamo_local.core.sizing.architecture import architecture_facts, language_part
from dynamo_local.core.sizing.model_facts import ModelFacts, pools_by_name
from dynamo_local.model.weights import weight_facts, weight_files

# What the installed vLLM and Transformers can load, read from their sources: importing them takes many seconds.
#
# An answer of None means that the library is not installed or its source looks otherwise, and nothing can be said.

_REGISTRY = "model_executor/models/registry.py"
_POOLING_TABLES = (
    "_EMBEDDING_MODELS", "_LATE_INTERACTION_MODELS", "_REWARD_MODELS", "_TOKEN_CLASSIFICATION_MODELS",
    "_SEQUENCE_CLASSIFICATION_MODELS",
)  # fmt: skip
_GENERATING = ("ForCausalLM", "ForConditionalGeneration")
"""Ends of the names of classes that generate, and embed only if vLLM is told to convert them."""
_QUANTIZATION = "model_executor/layers/quantization/__init__.py"
_CONFIGS = "transformers_utils/config.py"
_PLUGINS = "vllm.general_plugins"
_OWN_PACKAGE = "dynamo_local"

_parsing = Lock()
"""Threads that make syntax trees at the same time share a count of their depth: CPython 3.11 raises SystemError or dies
then."""


@cache
def vllm_architectures() -> frozenset[str] | None:
    """Names of architectures that vLLM has code for."""
    tables = [names for table, names in _dictionaries("vllm", _REGISTRY).items() if table.endswith("_MODELS")]
    excluded = vllm_retired().keys() | vllm_moved().keys()
    return frozenset().union(*tables) - excluded or None


@cache
def vllm_pooling() -> frozenset[str] | None:
    """Return the architectures among these that do not generate: they answer with embeddings, classes or scores."""
    found = [
        name
        for statement in _statements("vllm", _REGISTRY)
        if _target(statement) in _POOLING_TABLES and isinstance(value := _value(statement), ast.Dict)
        for name, model in _classes(value)
        if not model.endswith(_GENERATING)
    ]
    return frozenset(found) or None


def _classes(table: ast.Dict) -> Iterator[tuple[str, str]]:
    """Names of architectures in one of vLLM's tables, with the classes that load them."""
    for key, value in zip(table.keys, table.values, strict=True):
        if isinstance(key, ast.Constant) and isinstance(value, ast.Tuple) and isinstance(value.elts[-1], ast.Constant):
            yield str(key.value), str(value.elts[-1].value)


@cache
def vllm_retired() -> dict[str, str]:
    """Architectures that vLLM had once, each with the last version that has it."""
    return _strings("vllm", _REGISTRY, "_PREVIOUSLY_SUPPORTED_MODELS")


@cache
def vllm_moved() -> dict[str, str]:
    """Architectures that a plugin of vLLM has, each with the plugin's address."""
    return _strings("vllm", _REGISTRY, "_OOT_SUPPORTED_MODELS")


@cache
def has_plugins() -> bool:
    """Whether plugins of others are installed, which may teach vLLM more architectures."""
    packages = {point.module.partition(".")[0] for point in metadata.entry_points(group=_PLUGINS)}
    return not packages <= {_OWN_PACKAGE, "vllm"}


@cache
def vllm_quantizations() -> frozenset[str] | None:
    """Methods of quantization that vLLM knows."""
    for statement in _statements("vllm", _QUANTIZATION):
        if isinstance(statement, ast.Assign) and _target(statement) == "QuantizationMethods":
            constants = (node.value for node in ast.walk(statement.value) if isinstance(node, ast.Constant))
            return frozenset(value for value in constants if isinstance(value, str))
    return None


@cache
def transformers_architectures() -> frozenset[str] | None:
    """Names of the models' classes that Transformers has, which vLLM may run by its Transformers backend."""
    return frozenset(_second_strings("models/auto/modeling_auto.py")) or None


@cache
def known_model_types() -> frozenset[str] | None:
    """The values of `model_type` whose configuration Transformers or vLLM can read without a model's own code."""
    listed = frozenset(_first_strings("models/auto/auto_mappings.py"))
    if not listed:
        return None
    added = frozenset(_dictionary_keys("models/auto/configuration_auto.py"))
    return listed | added | frozenset(_keywords("vllm", _CONFIGS, "_CONFIG_REGISTRY"))


def _dictionaries(package: str, file: str) -> dict[str, frozenset[str]]:
    """The string keys of each dictionary that a module defines."""
    found = {}
    for statement in _statements(package, file):
        value = _value(statement)
        if isinstance(value, ast.Dict):
            keys = (key.value for key in value.keys if isinstance(key, ast.Constant))
            found[_target(statement)] = frozenset(key for key in keys if isinstance(key, str))
    return found


def _strings(package: str, file: str, table: str) -> dict[str, str]:
    """The entries of a dictionary that have strings as keys and values."""
    for statement in _statements(package, file):
        value = _value(statement)
        if _target(statement) == table and isinstance(value, ast.Dict):
            pairs = zip(value.keys, value.values, strict=True)
            return {
                str(key.value): str(item.value)
                for key, item in pairs
                if isinstance(key, ast.Constant) and isinstance(item, ast.Constant)
            }
    return {}


def _keywords(package: str, file: str, table: str) -> Iterator[str]:
    for statement in _statements(package, file):
        value = _value(statement)
        if _target(statement) == table and isinstance(value, ast.Call):
            yield from (keyword.arg for keyword in value.keywords if keyword.arg)
            unpacked = (keyword.value for keyword in value.keywords if isinstance(keyword.value, ast.Dict))
            yield from (str(key.value) for part in unpacked for key in part.keys if isinstance(key, ast.Constant))


def _first_strings(file: str) -> Iterator[str]:
    for first, _ in _pairs("CONFIG_MAPPING_NAMES", file):
        yield first


def _dictionary_keys(file: str) -> Iterator[str]:
    """The keys of all dictionaries that are written out at the top level of a module of Transformers."""
    for statement in _statements("transformers", file):
        if isinstance(statement, ast.Expr | ast.Assign):
            parts = (node for node in ast.walk(statement) if isinstance(node, ast.Dict))
            yield from (str(key.value) for part in parts for key in part.keys if isinstance(key, ast.Constant))


def _second_strings(file: str) -> Iterator[str]:
    for _, second in _pairs("_MAPPING_NAMES", file):
        yield second


def _pairs(table: str, file: str) -> Iterator[tuple[str, str]]:
    """The pairs of strings in the ordered dictionaries of Transformers whose names end with `table`."""
    for statement in _statements("transformers", file):
        value = _value(statement)
        if value is not None and _target(statement).endswith(table):
            for node in ast.walk(value):
                if isinstance(node, ast.Tuple):
                    constants = [item.value for item in ast.walk(node) if isinstance(item, ast.Constant)]
                    texts = [constant for constant in constants if isinstance(constant, str)]
                    yield from ((texts[0], text) for text in texts[1:])


@cache
def _statements(package: str, file: str) -> tuple[ast.stmt, ...]:
    """The top-level statements of a module of an installed package; none if it is not there or not readable."""
    spec = util.find_spec(package)
    if spec is None or spec.origin is None:
        return ()
    try:
        return tuple(parsed((Path(spec.origin).parent / file).read_bytes()))
    except (OSError, SyntaxError):
        return ()


def parsed(source: bytes) -> list[ast.stmt]:
    """The top-level statements of a module's source, from any thread. Raises SyntaxError."""
    with _parsing:
        return ast.parse(source).body


def _target(statement: ast.stmt) -> str:
    target = statement.target if isinstance(statement, ast.AnnAssign) else None
    if isinstance(statement, ast.Assign):
        target = statement.targets[0] if isinstance(statement.targets[0], ast.Name) else None
    return target.id if isinstance(target, ast.Name) else ""


def _value(statement: ast.stmt) -> ast.expr | None:
    return statement.value if isinstance(statement, ast.Assign | ast.AnnAssign) else None


# Reads the figures of a model from the files in its folder, in milliseconds: no weight is read.

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
