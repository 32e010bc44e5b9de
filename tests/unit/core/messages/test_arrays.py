"""Arrays on the wire: their bytes fit their shape, and cutting rows off is what slicing would be."""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core import codec
from dynamo_local.core.errors import DecodeError
from dynamo_local.core.messages.work import Array, Logprobs, TokenBatch, TokenDelta
from tests.unit.core.messages.messages_strategies import arrays, logprobs


@given(arrays(), st.integers(0, 6))
def test_without_first_keeps_the_last_rows(array: Array, rows: int) -> None:
    rest = array.without_first(rows)
    kept = max(array.shape[0] - rows, 0)
    assert rest.shape == (kept, *array.shape[1:])
    assert rest.dtype == array.dtype
    assert array.data.endswith(rest.data)


def test_without_first_cuts_whole_rows() -> None:
    array = Array("int32", (3, 2), struct.pack("<6i", 1, 2, 3, 4, 5, 6))
    assert array.without_first(1).data == struct.pack("<4i", 3, 4, 5, 6)
    assert array.without_first(0) == array
    assert array.without_first(3) == array.without_first(9) == Array("int32", (0, 2), b"")


@given(logprobs(), st.integers(0, 6))
def test_logprobs_lose_the_same_positions_everywhere(given_logprobs: Logprobs, positions: int) -> None:
    rest = given_logprobs.without_first(positions)
    assert rest.token_ids == given_logprobs.token_ids.without_first(positions)
    assert rest.ranks.shape[0] == rest.logprobs.shape[0] == rest.token_ids.shape[0]


@pytest.mark.parametrize(
    ("dtype", "shape", "size"),
    [("int32", (), 0), ("int32", (2,), 4), ("int64", (2,), 8), ("float32", (2, 2), 17), ("int32", (-1,), 0)],
)
def test_bytes_that_do_not_fit_the_shape_are_no_array(dtype: Any, shape: tuple[int, ...], size: int) -> None:
    with pytest.raises(ValueError, match="array of shape"):
        Array(dtype, shape, bytes(size))


def _ints(*shape: int, size: int) -> list[Any]:
    return ["int32", list(shape), bytes(size)]


def _batch_with(logprobs: list[Any]) -> bytes:
    delta = dict.fromkeys(TokenDelta.__struct_fields__)
    delta |= {"request_id": "r", "epoch": 1, "position": 0, "token_ids": [7], "logprobs": logprobs}
    delta |= {"refused": False, "failed": False, "events": [], "created_tokens": 0}
    return msgspec.msgpack.encode((codec.VERSION, ["w", 1, [list(delta.values())]]))


def test_well_shaped_logprobs_arrive() -> None:
    shapes = [_ints(1, 2, size=8), _ints(1, 2, size=8), _ints(1, size=4)]
    (delta,) = codec.decode(_batch_with(shapes), TokenBatch).deltas
    assert delta.logprobs is not None
    assert delta.logprobs.token_ids.shape == (1, 2)


@pytest.mark.parametrize(
    "shapes",
    [
        pytest.param([_ints(size=4)] * 3, id="no dimension"),
        pytest.param([_ints(1, 1, size=4), _ints(1, 2, size=8), _ints(1, size=4)], id="candidates differ"),
        pytest.param([_ints(1, 1, size=4), _ints(1, 1, size=4), _ints(2, size=8)], id="positions differ"),
        pytest.param([_ints(1, 1, size=4), _ints(1, 1, size=3), _ints(1, size=4)], id="bytes are missing"),
    ],
)
def test_misshapen_logprobs_are_refused_where_they_arrive(shapes: list[Any]) -> None:
    with pytest.raises(DecodeError):
        codec.decode(_batch_with(shapes), TokenBatch)
