"""Tells the targets of `dynamo serve` apart: a graph (`package.module:Service`), or a model."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from dynamo_local.core.errors import UsageError

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_HUB_URL = re.compile(r"(?:https?://(?:www\.)?(?:huggingface\.co|hf\.co)/|hf://(?:models/)?)([^/?#]+/[^/?#]+)")
_WINDOWS = re.compile(r"[A-Za-z]:[\\/]|\\\\")
_HUB_ID = re.compile(r"\w[\w.-]*(?:/[\w.-]+)?(?:@[^\s@]+)?")

_WHAT = "give a folder, a Hugging Face id (ORGANISATION/NAME), or a graph (package.module:Service)"


@dataclass(frozen=True)
class Target:
    """What is to be served. `name` is a model's folder, id or name, or a graph's `module:Service`."""

    name: str
    is_graph: bool


def parse_target(text: str) -> Target:
    """Raises UsageError for what can be neither a graph nor a model."""
    if _URL.match(text):
        hub = _HUB_URL.match(text)
        raise UsageError(f"{text!r} is an address, not a model", f"write {hub[1]}" if hub else _WHAT)
    if _WINDOWS.match(text) or ("\\" in text and "/" not in text):
        raise UsageError(f"{text!r} is a path of Windows", "write the folder as this system has it: /models/mine")
    # Not Path.exists, which raises where this user may not look.
    if text and os.access(Path(text).expanduser(), os.F_OK):
        return Target(text, is_graph=False)
    module, colon, service = text.partition(":")
    if colon:
        return _with_colon(text, module, service)
    if _is_module(text) and "." in text:
        return Target(text, is_graph=True)
    _check_model(text)
    return Target(text, is_graph=False)


def _with_colon(text: str, module: str, service: str) -> Target:
    if not _is_module(module):
        raise UsageError(f"{text!r} is no model and no graph", _WHAT)
    if service and not service.isidentifier():
        remedy = f"names with a tag are Ollama's; {_WHAT}"
        raise UsageError(f"{text!r} names no service, since {service!r} is no name of a class", remedy)
    return Target(text, is_graph=True)


def _is_module(text: str) -> bool:
    return all(part.isidentifier() for part in text.split("."))


def _check_model(text: str) -> None:
    """Raise UsageError for what can be neither a path nor an id. Whether it is there is checked later."""
    looks_like_path = text.startswith((".", "/", "~")) or text.count("/") > 1
    if not looks_like_path and not _HUB_ID.fullmatch(text):
        raise UsageError(f"{text!r} is no model", _WHAT)
