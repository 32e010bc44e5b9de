"""What the installed vLLM and Transformers can load, read from their sources: importing them takes many seconds.

An answer of None means that the library is not installed or its source looks otherwise, and nothing can be said.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from importlib import metadata, util
from pathlib import Path
from threading import Lock

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
