from __future__ import annotations

import math
import struct

from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.messages.work import Array
from dynamo_local.engine.mocker.engine import logprobs_of


def unpacked(array: Array) -> list[float]:
    code = {"int64": "q", "float32": "f"}[array.dtype]
    return list(struct.unpack(f"<{math.prod(array.shape)}{code}", array.data))


@given(st.integers(1, 300), st.data())
def test_shape_and_content(vocab_size: int, data: st.DataObject) -> None:
    token_id = data.draw(st.integers(0, vocab_size - 1))
    candidates = data.draw(st.integers(-1, vocab_size))
    logprobs = logprobs_of(token_id, candidates, vocab_size)
    count = vocab_size if candidates == -1 else candidates
    assert logprobs.token_ids.shape == logprobs.logprobs.shape == (1, count + 1)
    assert logprobs.ranks.shape == (1,)
    ids, values = unpacked(logprobs.token_ids), unpacked(logprobs.logprobs)
    assert ids[0] == token_id
    assert unpacked(logprobs.ranks) == [1]
    assert len(set(ids[1:])) == count
    assert all(0 <= i < vocab_size for i in ids)
    assert values[1:] == sorted(values[1:], reverse=True)
    assert sum(map(math.exp, values[1:])) <= 1.0
    if count:
        assert (ids[1], values[1]) == (ids[0], values[0])
