"""Settings that a config.json leaves out because they are the defaults of its class in Transformers.

The configuration of Gemma 3, for example, leaves out the number of heads. The defaults are read from the source of the
installed Transformers, since importing the library takes seconds.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import util
from pathlib import Path
from typing import Any

from dynamo_local.core.sizing.architecture import language_part
from dynamo_local.model.known import parsed

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
