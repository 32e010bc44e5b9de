"""The settings for the Hugging Face Hub. Tokens are never shown."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dynamo_local.core.doctor.finding import Finding, fail, ok, shown_bytes, warn

DEFAULT_ENDPOINT = "https://huggingface.co"


@dataclass(frozen=True)
class Hub:
    """`endpoint`: $HF_ENDPOINT, if set. `token_source`: where a token was found. `token_open`: whether others can read
    its file. `models`: number in the cache. `cache_bytes`: None if it is too large to add up quickly."""

    is_offline: bool
    endpoint: str | None
    token_source: str | None
    token_open: bool
    cache: str
    models: int
    cache_bytes: int | None


def check_hub(facts: Hub) -> Iterator[Finding]:
    yield _hub(facts)
    yield _token(facts)


def _hub(facts: Hub) -> Finding:
    size = "" if facts.cache_bytes is None else f", {shown_bytes(facts.cache_bytes)}"
    cached = f"{facts.models} models in {facts.cache}{size}"
    if facts.endpoint is not None and not facts.endpoint.startswith(("http://", "https://")):
        return fail("hub", "HF_ENDPOINT is not an http address", f"unset it, or write {DEFAULT_ENDPOINT}")
    if facts.is_offline and not facts.models:
        return warn(
            "hub",
            f"offline (HF_HUB_OFFLINE), and there is no model in {facts.cache}",
            "unset HF_HUB_OFFLINE to download, or serve a folder or `random`",
        )
    where = "offline (HF_HUB_OFFLINE)" if facts.is_offline else facts.endpoint or DEFAULT_ENDPOINT
    return ok("hub", f"{where}; {cached}")


def _token(facts: Hub) -> Finding:
    if facts.token_source is None:
        return ok("hub token", "none: gated models cannot be downloaded (`hf auth login`, or HF_TOKEN)")
    if facts.token_open:
        return warn("hub token", f"other users can read {facts.token_source}", f"run: chmod 600 {facts.token_source}")
    return ok("hub token", f"there is one ({facts.token_source})")
