from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.messages.kv import PinAnswer
from dynamo_local.core.ports import PulledPrefix
from dynamo_local.engine.mocker.pulls import Handle, fingerprint, plan_pull
from dynamo_local.engine.mocker.sequence import Pull
from dynamo_local.engine.mocker.settings import MockerSettings

HASHES = [bytes([i]) * 16 for i in range(6)]


def offer(hashes: list[bytes], blocks: int | None = None, handle: object = None) -> PulledPrefix:
    count = len(hashes) if blocks is None else blocks
    given = Handle("/m", tuple(range(10, 10 + count))) if handle is None else handle
    return PulledPrefix("p", tuple(hashes), PinAnswer(count, 9.0, msgspec.Raw(msgspec.msgpack.encode(given))))


def test_all_of_a_context() -> None:
    assert plan_pull(offer(HASHES), HASHES) == Pull("/m", (10, 11, 12, 13, 14, 15), 0, 9.0)


def test_only_as_many_as_the_source_has() -> None:
    assert plan_pull(offer(HASHES, 2), HASHES) == Pull("/m", (10, 11), 0, 9.0)


def test_only_what_was_missing() -> None:
    assert plan_pull(offer(HASHES[2:5]), HASHES) == Pull("/m", (10, 11, 12), 2, 9.0)


def test_no_more_than_the_context_has() -> None:
    assert plan_pull(offer(HASHES), HASHES[:4]) == Pull("/m", (10, 11, 12, 13), 0, 9.0)


@pytest.mark.parametrize(
    "useless",
    [
        offer(HASHES, 0),
        offer(HASHES, -1),
        offer([]),
        offer([b"x" * 16]),
        offer([HASHES[0], HASHES[2]]),
        offer(HASHES, handle=Handle("/m", (1, 2))),
        offer(HASHES, handle=Handle("/m", (-1,) * 6)),
        offer(HASHES, handle=None).__class__("p", tuple(HASHES), PinAnswer(6, 9.0)),
        offer(HASHES, handle="words"),
    ],
)
def test_an_offer_that_makes_no_sense_is_passed_over(useless: PulledPrefix) -> None:
    assert plan_pull(useless, HASHES) is None


@given(st.integers(0, 8), st.integers(0, 12))
def test_reading_helps_if_it_goes_on_from_what_is_here_and_ends_later(cached: int, now: int) -> None:
    pull = Pull("/m", (1, 2, 3), 2, 9.0)
    assert pull.helps(cached, now) == (cached in (2, 3, 4) and now < 9)


def test_engines_of_another_kind_have_another_fingerprint() -> None:
    kinds = [
        fingerprint(settings, model)
        for settings in (
            MockerSettings(),
            MockerSettings(mocker_block_size=16),
            MockerSettings(mocker_vocab_size=100),
        )
        for model in ("a", "b")
    ]
    assert len(set(kinds)) == len(kinds)
    assert fingerprint(MockerSettings(mocker_kv_blocks=5), "a") == kinds[0]
