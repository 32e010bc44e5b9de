"""Generators of endpoints that could be ordered."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from dynamo_local.core.endpoints.checks import read_spec
from dynamo_local.core.endpoints.spec import EndpointSpec

NAMES = ("a", "b", "c", "d-1")
names = st.sampled_from(NAMES)
plain = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
settings = st.dictionaries(
    st.sampled_from(["seed", "max-model-len", "enforce-eager", "hf-overrides"]),
    plain | st.text(max_size=5) | st.lists(plain, max_size=2) | st.dictionaries(st.text("xyz", max_size=2), plain),
    max_size=2,
)


@st.composite
def specs(draw: st.DrawFn, name: st.SearchStrategy[str] = names, base: str | None = None) -> EndpointSpec:
    """Specs as `read_spec` returns them; adapters of `base` if it is given."""
    fields: dict[str, Any] = {
        "name": draw(name.filter(lambda name: name != base)),
        "model": draw(st.sampled_from(["one", "two"])),
        "labels": draw(st.dictionaries(st.text("kl", min_size=1, max_size=2), st.text("v", max_size=2), max_size=2)),
    }
    if base is not None:
        return read_spec(fields | {"adapter_of": base})
    least, prefill = draw(st.integers(0, 4)), draw(st.booleans())
    fields |= {
        "engine": draw(st.sampled_from(["vllm", "mocker"])),
        "args": draw(settings),
        "gpu": draw(st.none() | st.sampled_from([0.25, 0.5, 1, 2])),
        "min_workers": least,
        "max_workers": draw(st.none() | st.integers(max(1, least), 8)),
        "park_after_s": draw(st.none() | st.integers(1, 30)),
        "sleep_after_s": draw(st.none() | st.integers(31, 60)) if least == 0 else None,
        "disaggregated": prefill,
        "max_prefill_workers": draw(st.none() | st.integers(1, 4)) if prefill else None,
        "awake": draw(st.lists(st.sampled_from(["mon-fri 08:00-18:30", "daily 20:00"]), max_size=2)),
        "forecast": draw(st.booleans()),
        "requests_per_worker": draw(st.integers(1, 64)),
        "policy": draw(st.sampled_from(["concurrency", "load", "freeness", "dynamo"])),
    }
    return read_spec(fields)
