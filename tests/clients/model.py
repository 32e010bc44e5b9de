"""Copies of the model `random` for tests of clients: the same answers each time, JSON that ends, thinking."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors.numpy import load_file, save_file

from dynamo_local.model.named.random_model import random_model

THINK = {254: "<think>", 255: "</think>"}
"""Token id -> what it becomes. As bytes these are in no UTF-8 text."""
_AS_BYTES = {254: "þ", 255: "ÿ"}
_ANSWER = "<|assistant|>"
_THINKING = "{% if enable_thinking %}<think>{% else %}<think></think>{% endif %}"
"""Like the templates of models that think, whose parsers expect it."""
_TOOLS = (
    "{% if tools %}<|system|>Answer, or call one of these as <tool_call>{name, arguments}</tool_call>:"
    "{% for tool in tools %} {{ tool.function.name }}{% endfor %}{{ eos_token }}{% endif %}"
)
"""Like the templates of models that call tools, by which `dynamo serve` chooses the parser: hermes."""
_SPACES, _STRUCTURE = b" \t\r\n", b'"{}[]:,<'
_PULL = 20.0
"""Weight with which a space makes a structural character of JSON the next token. Without it, this model would write
spaces without end where a JSON grammar allows them."""


def steady_model(folder: Path, **generation: object) -> Path:
    """Make a model that is greedy by default and ends its JSON. `generation`: more defaults of requests."""
    shutil.copytree(random_model(), folder)
    _end_runs_of_spaces(folder / "model.safetensors")
    settings = json.loads((folder / "generation_config.json").read_text())
    # Greedy, so that tests repeat their results also with clients that cannot set a temperature.
    (folder / "generation_config.json").write_text(json.dumps(settings | {"temperature": 0} | generation))
    return folder


def thinking_model(folder: Path) -> Path:
    """Make a steady model that encloses its thoughts in tokens if thinking is enabled."""
    steady_model(folder)
    _add_tokens(folder)
    return folder


def _end_runs_of_spaces(weights: Path) -> None:
    tensors = load_file(weights)
    towards = tensors["lm_head.weight"][list(_STRUCTURE)].mean(axis=0)
    tensors["model.embed_tokens.weight"][list(_SPACES)] = _PULL * towards / abs(towards).max()
    save_file(tensors, weights, metadata={"format": "pt"})


def _add_tokens(folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    for number, token in THINK.items():
        assert vocabulary.pop(_AS_BYTES[number]) == number
        vocabulary[token] = number
        like = tokenizer["added_tokens"][0]
        tokenizer["added_tokens"].append({**like, "id": number, "content": token, "special": False})
    tokenizer["added_tokens"].sort(key=lambda token: token["id"])
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    template = settings["chat_template"]
    settings["chat_template"] = template.replace(f"%}}{_ANSWER}{{%", f"%}}{_ANSWER}{_THINKING}{{%")
    assert settings["chat_template"] != template
    settings["chat_template"] = settings["chat_template"].replace("{{ bos_token }}", "{{ bos_token }}" + _TOOLS, 1)
    assert _TOOLS in settings["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
