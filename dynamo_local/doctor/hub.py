"""Facts about the Hugging Face Hub's settings and cache. Tokens are looked for and never read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dynamo_local.core.doctor.hub import Hub
from dynamo_local.doctor.files import size_of

_TRUE = ("1", "on", "yes", "true")
_ENDPOINT = "HF_ENDPOINT"
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
_OTHERS = 0o077


def hub(environ: Mapping[str, str]) -> Hub:
    cache = cache_folder(environ)
    source, is_open = _token(environ)
    offline = any(environ.get(name, "").lower() in _TRUE for name in _OFFLINE)
    models = len(list(cache.glob("models--*")))
    return Hub(
        offline,
        environ.get(_ENDPOINT) or None,
        source,
        is_open,
        str(cache),
        models,
        size_of(cache) if models else 0,
    )


def cache_folder(environ: Mapping[str, str]) -> Path:
    """The folder of downloaded models, by the variables of the library huggingface_hub."""
    return _folder(environ, "HF_HUB_CACHE") or _home(environ) / "hub"


def _home(environ: Mapping[str, str]) -> Path:
    return _folder(environ, "HF_HOME") or _cache_home(environ) / "huggingface"


def _folder(environ: Mapping[str, str], name: str) -> Path | None:
    value = environ.get(name)
    return Path(value).expanduser() if value else None


def _cache_home(environ: Mapping[str, str]) -> Path:
    return _folder(environ, "XDG_CACHE_HOME") or Path(environ.get("HOME") or "~").expanduser() / ".cache"


def _token(environ: Mapping[str, str]) -> tuple[str | None, bool]:
    """The place of the token, and whether it is a file that others can read."""
    for name in _TOKENS:
        if environ.get(name):
            return name, False
    path = _folder(environ, "HF_TOKEN_PATH") or _home(environ) / "token"
    try:
        return str(path), bool(path.stat().st_mode & _OTHERS)
    except OSError:
        return None, False
