from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.errors import RequestError
from dynamo_local.engine.mocker.tokens import Sampling, read_sampling


def read(**fields: Any) -> Sampling:
    return read_sampling(msgspec.msgpack.encode(fields), vocab_size=256)


def test_what_is_left_out_has_the_default_of_vllm() -> None:
    assert read() == Sampling(n=1, max_tokens=16, min_tokens=0, ignore_eos=False)


def test_fields_are_known_by_vllms_names_and_others_are_passed_over() -> None:
    sampling = read(
        max_tokens=None,
        min_tokens=2,
        stop_token_ids=[5, 6],
        logprobs=3,
        _eos_token_id=7,
        _all_stop_token_ids=[5, 6, 7],
        temperature=0.5,
        seed=1,
        structured_outputs=None,
    )
    assert sampling == Sampling(
        max_tokens=None, min_tokens=2, stop_token_ids=frozenset({5, 6}), logprobs=3, eos_token_id=7
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": 2}, "one output a request"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"logprobs": 257}, "logprobs must be -1 to 256"),
        ({"logprobs": -2}, "logprobs must be -1 to 256"),
        ({"prompt_logprobs": 0}, "no prompt_logprobs"),
        ({"max_tokens": "many"}, "cannot be read"),
    ],
)
def test_what_the_mocker_cannot_do_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        read(**fields)


@given(st.binary(max_size=30))
def test_garbage_raises_request_errors_only(data: bytes) -> None:
    with suppress(RequestError):
        read_sampling(data, 256)
