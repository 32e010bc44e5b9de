"""Masks secrets in configuration that is printed.

Configuration may hold secrets: API keys in `ServiceArgs.envs`, passwords in URLs. Code that prints configuration must
use this module. When in doubt it masks: a harmless value under a suspicious name is masked too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

MASK = "***"

_WORDS = frozenset({"key", "auth", "pass", "pwd", "pat"})
_ENDINGS = ("token", "password", "passwd", "passphrase", "secret", "apikey", "credential", "credentials")
_USERINFO = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_MAX_SHOWN = 80


def looks_secret(name: str) -> bool:
    """Return whether a variable or key of this name probably holds a secret: HF_TOKEN does, max-tokens does not."""
    words = [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word]
    return any(word in _WORDS or word.endswith(_ENDINGS) for word in words)


def redact(name: str, value: Any) -> Any:
    """Return the value with secrets masked: values under suspicious names, and user names and passwords in URLs."""
    secret = looks_secret(name)
    if isinstance(value, Mapping):
        return {key: redact(name if secret else str(key), item) for key, item in value.items()}
    if secret and not isinstance(value, bool | None):
        return MASK
    if isinstance(value, list | tuple):
        return [redact("", item) for item in value]
    if isinstance(value, str):
        return _USERINFO.sub(MASK, value)
    return value


def shown(name: str, value: Any) -> str:
    """Return the value as error messages show it: redacted, on one line, and shortened."""
    text = repr(redact(name, value))
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."
