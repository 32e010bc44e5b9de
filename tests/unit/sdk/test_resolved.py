from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.errors import DecodeError, GraphError
from dynamo_local.sdk.config.resolved import MASK, ResolvedGraph, ResolvedService, looks_secret, redact, shown

texts = st.text(max_size=6)
plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=5,
)
services = st.builds(
    ResolvedService,
    name=texts,
    target=texts,
    role=texts,
    workers=st.integers(1, 9),
    gpu=st.integers(0, 8),
    cpu=st.floats(0, 64),
    envs=st.dictionaries(texts, texts, max_size=2),
    config=st.dictionaries(texts, plain, max_size=3),
    depends_on=st.lists(texts, max_size=2).map(tuple),
)
graphs = st.builds(ResolvedGraph, texts, texts, st.lists(services, min_size=1, max_size=3).map(tuple))


def service(**changes: Any) -> ResolvedService:
    base = ResolvedService("S", "m:S", "service", 1, 0, 0.0, {}, {}, ())
    return msgspec.structs.replace(base, **changes)


@given(graphs)
def test_a_graph_survives_json(graph: ResolvedGraph) -> None:
    assert ResolvedGraph.from_json(graph.to_json()) == graph


@given(st.binary())
def test_garbage_raises_decode_errors_only(data: bytes) -> None:
    with pytest.raises(DecodeError):
        ResolvedGraph.from_json(data)


def test_another_version_is_refused() -> None:
    graph = ResolvedGraph("m:S", "n", (service(),), schema_version=2)
    with pytest.raises(DecodeError, match="version 2"):
        ResolvedGraph.from_json(graph.to_json())


def test_an_unknown_service_names_the_known() -> None:
    with pytest.raises(GraphError, match="the graph has no service 'T'; it has S"):
        ResolvedGraph("m:S", "n", (service(),)).service("T")


def test_redaction_masks_secrets_and_nothing_else() -> None:
    secret = service(
        envs={
            "OPENAI_API_KEY": "k1",
            "HF_TOKEN": "k2",
            "PGPASSWORD": "k3",
            "MAX_TOKENS": "4",
            "U": "http://a:k4@h/p",
        },
        config={
            "api-key": ["k5"],
            "hf-token": True,
            "tokenizer": "t",
            "max-num-batched-tokens": 8,
            "extra": {"client_secret": "k6", "list": [{"password": "k7"}]},
        },
    )
    graph = ResolvedGraph("m:S", "n", (secret,)).redacted()
    text = graph.to_json().decode()
    assert not [n for n in range(1, 8) if f"k{n}" in text]
    shown_config = graph.services[0].config
    assert shown_config["extra"] == {"client_secret": MASK, "list": [{"password": MASK}]}
    assert shown_config["tokenizer"] == "t"
    assert shown_config["max-num-batched-tokens"] == 8
    assert shown_config["hf-token"] is True
    assert graph.services[0].envs["MAX_TOKENS"] == "4"
    assert graph.services[0].envs["U"] == f"http://{MASK}@h/p"


@given(st.sampled_from(["API_KEY", "x-token", "MY_SECRET", "password", "Credentials"]), plain)
def test_what_looks_secret_is_never_shown(name: str, value: Any) -> None:
    assert looks_secret(name)
    if isinstance(value, str | int | float | list) and not isinstance(value, bool):
        assert redact(name, value) == MASK


def test_shown_values_fit_on_a_line() -> None:
    assert shown("a", "x\ny") == r"'x\ny'"
    assert len(shown("a", "x" * 1000)) == 80
