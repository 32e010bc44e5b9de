"""The default port, proxies that would catch requests to this machine, and the settings and the cache of the Hugging
Face Hub, whose tokens are looked for, and never read or shown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from dynamo_local.control.answers import Finding, fail, ok, warn
from dynamo_local.doctor.files import OTHERS, shown_bytes, size_of
from state.machine.listeners import Listener, listener_on

LOOPBACK = ("127.0.0.1", "localhost")
_EXEMPT = ("no_proxy", "NO_PROXY")
_PROXIES = ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")

DEFAULT_ENDPOINT = "https://huggingface.co"
_TRUE = ("1", "on", "yes", "true")
_ENDPOINT = "HF_ENDPOINT"
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")


def check_network(host: str, port: int, environ: Mapping[str, str]) -> Iterator[Finding]:
    yield default_port(port, listener_on(host, port))
    no_proxy = next((environ[name] for name in _EXEMPT if environ.get(name)), "")
    yield proxies([name for name in _PROXIES if environ.get(name)], no_proxy)


def default_port(port: int, listener: Listener | None) -> Finding:
    """`listener`: on the port; None if it is free."""
    if listener is None:
        return ok("port", f"port {port} is free")
    found = f"port {port} is used by {listener}"
    if listener.namespace is not None:
        return ok("port", found)
    return warn("port", found, "end that process, or serve with --port 0 (any free port)")


def proxies(names: Sequence[str], no_proxy: str) -> Finding:
    """`names`: of the variables that name a proxy for HTTP. `no_proxy`: hosts that are reached without."""
    if not names:
        return ok("proxy", "no proxy is set")
    caught = [host for host in LOOPBACK if not bypasses_proxy(host, no_proxy)]
    found = f"{', '.join(names)} set"
    if not caught:
        return ok("proxy", f"{found}, and NO_PROXY exempts this machine")
    return warn(
        "proxy",
        f"{found}: clients would ask the proxy for {' and '.join(caught)}",
        f"export NO_PROXY={','.join(filter(None, (no_proxy, *caught)))}",
    )


def bypasses_proxy(host: str, no_proxy: str) -> bool:
    """Whether $NO_PROXY exempts the host."""
    entries = (entry.strip().lstrip(".").partition(":")[0] for entry in no_proxy.split(","))
    return any(entry in ("*", host) or (host == LOOPBACK[0] and entry == "127.0.0.0/8") for entry in entries)


def check_hub(environ: Mapping[str, str]) -> Iterator[Finding]:
    cache = cache_folder(environ)
    offline = any(environ.get(name, "").lower() in _TRUE for name in _OFFLINE)
    models = len(list(cache.glob("models--*")))
    yield hub(environ.get(_ENDPOINT) or None, offline, cache, models, size_of(cache) if models else 0)
    yield token(*_token(environ))


def hub(endpoint: str | None, is_offline: bool, cache: Path, models: int, cache_bytes: int | None) -> Finding:
    """`endpoint`: $HF_ENDPOINT, if set. `models`: number in the cache. `cache_bytes`: None if it is too large to add up
    quickly."""
    size = "" if cache_bytes is None else f", {shown_bytes(cache_bytes)}"
    if endpoint is not None and not endpoint.startswith(("http://", "https://")):
        return fail("hub", "HF_ENDPOINT is not an http address", f"unset it, or write {DEFAULT_ENDPOINT}")
    if is_offline and not models:
        return warn(
            "hub",
            f"offline (HF_HUB_OFFLINE), and there is no model in {cache}",
            "unset HF_HUB_OFFLINE to download, or serve a folder or `random`",
        )
    where = "offline (HF_HUB_OFFLINE)" if is_offline else endpoint or DEFAULT_ENDPOINT
    return ok("hub", f"{where}; {models} models in {cache}{size}")


def token(source: str | None, is_open: bool) -> Finding:
    """`source`: where a token was found. `is_open`: whether others can read its file."""
    if source is None:
        return ok("hub token", "none: gated models cannot be downloaded (`hf auth login`, or HF_TOKEN)")
    if is_open:
        return warn("hub token", f"other users can read {source}", f"run: chmod 600 {source}")
    return ok("hub token", f"there is one ({source})")


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
        return str(path), bool(path.stat().st_mode & OTHERS)
    except OSError:
        return None, False
