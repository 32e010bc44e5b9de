"""Which values must not be shown, and what is shown in their place.

Configuration may hold secrets: API keys in `ServiceArgs.envs`, passwords in URLs. What prints configuration
prints it through this module. It errs towards hiding: a harmless value under a suspicious name is masked too.
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
    """Whether a variable or key of this name probably holds a secret: HF_TOKEN does, max-tokens does not."""
    words = [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word]
    return any(word in _WORDS or word.endswith(_ENDINGS) for word in words)


def redact(name: str, value: Any) -> Any:
    """The value with everything masked that looks secret, by its name or, in a URL, by its place."""
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
    """The value as an error message shows it: redacted, on one line, cut to a readable length."""
    text = repr(redact(name, value))
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."
