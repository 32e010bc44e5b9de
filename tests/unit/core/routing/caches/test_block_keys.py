"""Keys of blocks: packed and unpacked without loss, and alike from hashes and from numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.errors import DecodeError
from dynamo_local.core.routing.caches.index import key_of, pack, pack_hashes, unpack

hashes = st.lists(st.binary(min_size=8, max_size=32))


@given(st.lists(st.integers(0, 2**64 - 1)))
def test_unpacking_is_the_inverse_of_packing(keys: list[int]) -> None:
    assert list(unpack(pack(keys))) == keys


@given(hashes)
def test_hashes_are_packed_as_their_keys(of_blocks: list[bytes]) -> None:
    assert pack_hashes(of_blocks) == pack([key_of(each) for each in of_blocks])


@given(st.binary().filter(lambda data: len(data) % 8 != 0))
def test_a_part_of_a_key_is_refused(data: bytes) -> None:
    with pytest.raises(DecodeError):
        unpack(data)
