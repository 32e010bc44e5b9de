"""The worker host's side, with an engine core that answers from a table."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from dynamo_local.core.errors import EngineError
from dynamo_local.core.messages.kv import PinAnswer, PinQuestion
from dynamo_local.core.messages.work import Submit
from dynamo_local.core.ports import Prefix, PulledPrefix
from dynamo_local.engine.vllm.kv.pull.host import PullHost
from dynamo_local.engine.vllm.kv.pull.messages import (
    LONGEST_LEASE_S,
    MOST_BLOCKS,
    Description,
    Handle,
    Pinned,
    TransferParams,
)

HASHES = tuple(bytes([number]) for number in range(4))
DESCRIPTION = Description(engine="e", agents=(b"agent",), identity={}, block_size=1, block_bytes=4096)


class FakeCore:
    """vLLM's client of an engine core."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.asked: asyncio.Queue[tuple[str, tuple[Any, ...]]] = asyncio.Queue()

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        name = method.removeprefix("dynamo_local_")
        self.asked.put_nowait((name, args))
        answer = self.answers.get(name)
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, asyncio.Future):
            return await answer
        return msgspec.to_builtins(answer, builtin_types=(bytes,))


def hashes_of(token_ids: Sequence[int], cache_salt: str | None, adapter: str | None) -> list[bytes]:
    return [(adapter or "").encode() + bytes([token]) for token in token_ids]


def in_fours(token_ids: Sequence[int], cache_salt: str | None, adapter: str | None) -> list[bytes]:
    return [bytes([token_ids[at]]) for at in range(0, len(token_ids) // 4 * 4, 4)]


def pull_of(core: FakeCore, description: Description = DESCRIPTION) -> PullHost:
    return PullHost(core, description, {None: "print", "pirate": "pirate print"}, hashes_of)


def question(**changes: Any) -> PinQuestion:
    fields = {"pin": "p", "fingerprint": "print", "hashes": HASHES, "keep_s": 60.0}
    return PinQuestion(**{**fields, **changes})


def submission(**changes: Any) -> Submit:
    fields = {"request_id": "r", "epoch": 1, "frontend": "f", "token_ids": [1], "sampling": msgspec.Raw(b"\x80")}
    return Submit(**{**fields, **changes})


async def test_the_last_token_is_never_pulled() -> None:
    pull = pull_of(FakeCore(cached=2))
    prefix = pull.prefix([1, 2, 3], None, None)
    assert prefix == Prefix("print", (b"\1", b"\2"))
    assert await pull.cached(prefix) == 2


async def test_an_adapter_has_a_prefix_of_its_own() -> None:
    pull = pull_of(core := FakeCore(cached=2))
    prefix = pull.prefix([1, 2, 3], None, "pirate")
    assert prefix == Prefix("pirate print", (b"pirate\1", b"pirate\2"))
    assert await pull.cached(prefix) == 2
    assert core.asked.get_nowait() == ("cached", ((b"pirate\1", b"pirate\2"),))


def test_of_an_adapter_that_is_not_here_nothing_is_pulled() -> None:
    assert pull_of(FakeCore(cached=2)).prefix([1, 2, 3], None, "robot") is None


async def test_an_adapter_s_files_are_read_beside_the_event_loop() -> None:
    read = {name: threading.Event() for name in ("bard@1", "bard@2")}

    def print_of(adapter: Any) -> str:
        assert read[adapter.lora_name].wait(60.0)
        return f"print of {adapter.lora_name}"

    pull = PullHost(FakeCore(), DESCRIPTION, {None: "print", "bard": "old"}, hashes_of, print_of)
    pull.know_adapter("bard", SimpleNamespace(lora_name="bard@1"))
    pull.know_adapter("bard", SimpleNamespace(lora_name="bard@2"))
    assert pull.prefix([1, 2, 3], None, "bard") is None
    for name in ("bard@2", "bard@1"):
        read[name].set()
        async with asyncio.timeout(60.0):
            await asyncio.wait(pull._tasks, return_when=asyncio.FIRST_COMPLETED)
    prefix = pull.prefix([1, 2, 3], None, "bard")
    assert prefix is not None
    assert prefix.fingerprint == "print of bard@2"


@pytest.mark.parametrize("print_", ["print", "pirate print"])
async def test_blocks_are_lent_to_engines_with_the_same_weights(print_: str) -> None:
    pull = pull_of(FakeCore(pin=Pinned((5,))))
    assert (await pull.pin(question(fingerprint=print_))).blocks == 1
    pull.close()


async def test_no_block_no_question() -> None:
    pull = pull_of(core := FakeCore())
    prefix = pull.prefix([1], None, None)
    assert prefix == Prefix("print", ())
    assert await pull.cached(prefix) == 0
    assert core.asked.empty()


async def test_an_engine_that_cannot_pull_does_not_ask_and_is_not_pinned() -> None:
    pull = pull_of(FakeCore(), msgspec.structs.replace(DESCRIPTION, unsupported="it is a hybrid"))
    assert pull.prefix([1, 2, 3], None, None) is None
    assert (await pull.pin(question())).refused == "it is a hybrid"


@pytest.mark.parametrize(
    "refused",
    [
        question(fingerprint="another"),
        question(keep_s=0.0),
        question(keep_s=float("nan")),
        question(hashes=HASHES[:1] * (MOST_BLOCKS + 1)),
    ],
    ids=["foreign", "for no time", "nan", "long"],
)
async def test_pins_that_make_no_sense_do_not_reach_the_engine(refused: PinQuestion) -> None:
    core = FakeCore()
    answer = await pull_of(core).pin(refused)
    assert answer.blocks == 0
    assert answer.refused
    assert core.asked.empty()


async def test_a_pin_becomes_what_its_reader_submits() -> None:
    pull = pull_of(FakeCore(pin=Pinned((5, 6, 7))))
    asked_at = time.monotonic()
    answer = await pull.pin(question())
    assert (answer.blocks, answer.refused) == (3, None)
    assert asked_at + 60 <= answer.until <= time.monotonic() + 60
    params = msgspec.convert(pull.params_of(submission(hold_s=2.0), PulledPrefix("p", HASHES, answer)), TransferParams)
    assert params.hold_s == 2.0
    assert params.pull is not None
    assert params.pull.handle == Handle("e", (b"agent",), (5, 6, 7))
    assert (params.pull.hashes, params.pull.until) == (HASHES[:3], answer.until)
    pull.close()


def test_what_is_behind_the_last_full_block_is_pulled_as_well() -> None:
    pull = PullHost(FakeCore(), msgspec.structs.replace(DESCRIPTION, block_size=4), {None: "print"}, in_fours)
    assert pull.prefix(list(range(12)), None, None) == Prefix("print", (b"\0", b"\4"), rest=(8, 9, 10))


@pytest.mark.parametrize(
    ("hashes", "wanted", "blocks", "rest"),
    [(HASHES[:2], 3, (5, 6, 7), 2), (HASHES[:2], 1, (5, 6, 7), 1), (HASHES, 3, (5, 6), 0), (HASHES[:2], 0, (5, 6), 0)],
    ids=["all of it", "more than wanted", "behind a gap", "not wanted"],
)
async def test_a_tail_is_read_where_it_continues_the_prefix(
    hashes: tuple[bytes, ...], wanted: int, blocks: tuple[int, ...], rest: int
) -> None:
    pull = pull_of(core := FakeCore(pin=Pinned((5, 6, 7), rest=2)))
    asked = question(hashes=HASHES[:2], rest=(1, 2, 3))
    answer = await pull.pin(asked)
    assert (answer.blocks, answer.rest) == (2, 2)
    assert core.asked.get_nowait()[1][-1] == (1, 2, 3)
    params = pull.params_of(submission(), PulledPrefix("p", hashes, answer, rest=wanted))
    read = msgspec.convert(params, TransferParams).pull
    assert read is not None
    assert (read.handle.blocks, read.hashes, read.rest) == (blocks, HASHES[:2], rest)
    pull.close()


async def test_no_lease_lasts_for_ever() -> None:
    pull = pull_of(FakeCore(pin=Pinned((5,))))
    answer = await pull.pin(question(keep_s=1e6))
    assert answer.until <= time.monotonic() + LONGEST_LEASE_S
    pull.close()


@pytest.mark.parametrize("handle", [b"\xc0", b"\x00", b"", b"\xc1", b"\x90" * (1 << 20)])
async def test_a_handle_that_makes_no_sense_is_no_pull(handle: bytes) -> None:
    pulled = PulledPrefix("p", HASHES, PinAnswer(blocks=2, until=5.0, handle=msgspec.Raw(handle)))
    assert pull_of(FakeCore()).params_of(submission(), pulled) is None


@pytest.mark.parametrize("ranks", [0, 1, 2])
def test_a_handle_without_an_agent_for_each_rank_is_no_pull(ranks: int) -> None:
    handle = msgspec.msgpack.encode(Handle("e", (b"agent",) * ranks, (5, 6)))
    pulled = PulledPrefix("p", HASHES, PinAnswer(blocks=2, until=5.0, handle=msgspec.Raw(handle)))
    assert (pull_of(FakeCore()).params_of(submission(), pulled) is not None) is (ranks == 1)


async def test_an_engine_without_an_answer_is_a_refusal() -> None:
    core = FakeCore(pin=RuntimeError("dead"), cached=RuntimeError("dead"))
    pull = pull_of(core)
    assert (await pull.pin(question())).refused
    with pytest.raises(EngineError, match="does not answer"):
        await pull.cached(Prefix("print", HASHES))
    core.answers["pin"] = asyncio.get_running_loop().create_future()
    assert (await pull.pin(question(keep_s=0.05))).refused


async def test_an_idle_engine_is_told_of_the_end_of_its_leases() -> None:
    core = FakeCore(pin=Pinned((5,)), release=None)
    pull = pull_of(core)
    answer = await pull.pin(question(keep_s=0.05))
    async with asyncio.timeout(10):
        assert (await core.asked.get())[0] == "pin"
        assert await core.asked.get() == ("release", ((), ()))
    assert time.monotonic() >= answer.until
    pull.close()


async def test_a_later_lease_is_not_forgotten() -> None:
    core = FakeCore(release=time.monotonic() + 0.05)
    pull = pull_of(core)
    pull.release(pins=["a"], holds=["b"])
    async with asyncio.timeout(10):
        assert await core.asked.get() == ("release", (["a"], ["b"]))
        core.answers["release"] = None
        assert await core.asked.get() == ("release", ((), ()))
    pull.close()
