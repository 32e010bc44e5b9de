from __future__ import annotations

import asyncio
import subprocess
import sys
from dataclasses import replace

import pytest

from dynamo_local.core.errors import RequestError
from dynamo_local.core.messages.presence import EngineInfo, Load
from dynamo_local.core.messages.work import RequestEpoch
from dynamo_local.core.request.log import RequestLog, Verdict
from dynamo_local.engine.mocker.engine import MockerEngine
from dynamo_local.engine.mocker.tokens import continuation

from .driving import PROMPT, SETTINGS, deltas_of, engine_in, steps_until_finished, work
from .virtual_time import VirtualTime


async def test_start_tells_what_came_up_and_takes_its_time() -> None:
    time, told = VirtualTime(), list[str]()
    info = await engine_in(time, replace(SETTINGS, mocker_start_s=3.0, mocker_speedup=2.0)).start(told.append)
    assert info == EngineInfo(
        engine="mocker",
        model="test-model",
        max_model_len=64,
        block_size=4,
        kv_blocks=16,
        max_num_seqs=64,
        kv_events=True,
    )
    assert (time.slept, len(told)) == ([3.0], 1)


async def test_tokens_are_stamped_and_are_those_of_the_oracle() -> None:
    engine = engine_in(VirtualTime())
    submitted = work(epoch=3, position=7)
    await engine.submit(submitted)
    deltas = deltas_of(await steps_until_finished(engine))
    assert submitted.token_ids == PROMPT
    assert [delta.token_ids for delta in deltas] == [[token] for token in continuation(PROMPT, 4, 256)]
    assert [delta.position for delta in deltas] == [7, 8, 9, 10]
    assert {delta.epoch for delta in deltas} == {3}
    assert [delta.finish for delta in deltas] == [None, None, None, "length"]


async def test_a_step_takes_the_modelled_time() -> None:
    time = VirtualTime()
    engine = engine_in(time)
    await engine.submit(work("a"))
    await engine.submit(work("b", [50, 51, 52]))
    assert (await engine.step()).timestamp == pytest.approx(1000.018)
    assert (await engine.step()).timestamp == pytest.approx(1000.032)
    assert time.slept == pytest.approx([0.018, 0.014])


async def test_the_cache_is_told_of_once() -> None:
    engine = engine_in(VirtualTime())
    await engine.submit(work("first"))
    await steps_until_finished(engine)
    await engine.submit(work("second"))
    deltas = deltas_of(await steps_until_finished(engine), "second")
    assert [delta.cached_tokens for delta in deltas] == [4, None, None, None]


async def test_events_are_told_with_the_token_that_follows() -> None:
    time = VirtualTime()
    engine = engine_in(time, replace(SETTINGS, mocker_max_num_batched_tokens=3))
    await engine.submit(work())
    time.now += 1.0
    steps = [await engine.step() for _ in range(3)]
    assert steps[0].deltas == ()
    first, second = deltas_of(steps)
    assert [(kind, steps[1].timestamp - age_s) for kind, age_s in first.events] == [(1, 1000.0), (2, 1001.0)]
    assert second.events == ()


async def test_a_preempted_request_tells_so_and_repeats_nothing() -> None:
    time = VirtualTime()
    engine = engine_in(time, replace(SETTINGS, mocker_kv_blocks=6))
    for name, first in (("a", 10), ("b", 100)):
        await engine.submit(work(name, [first] * 7, max_tokens=12))
    steps = await steps_until_finished(engine, requests=2)
    for name, first in (("a", 10), ("b", 100)):
        deltas = deltas_of(steps, name)
        assert [delta.token_ids[0] for delta in deltas] == continuation([first] * 7, 12, 256)
        assert [delta.position for delta in deltas] == list(range(12))
    events = [
        (kind, step.timestamp - age_s)
        for step in steps
        for delta in deltas_of([step], "b")
        for kind, age_s in delta.events
    ]
    assert [kind for kind, _ in events][:4] == [1, 2, 3, 2]
    assert [at for _, at in events] == sorted(at for _, at in events)
    assert steps[-1].load == Load(running=0, waiting=0, kv_usage=0.0, kv_pinned=0.0)


async def test_every_step_tells_the_load() -> None:
    engine = engine_in(VirtualTime(), replace(SETTINGS, mocker_max_num_seqs=1))
    await engine.submit(work("a", max_tokens=1))
    await engine.submit(work("b", max_tokens=2))
    loads = [step.load for step in await steps_until_finished(engine, requests=2)]
    assert loads == [Load(0, 1, 0.0, 0.0), Load(1, 0, 2 / 16, 0.0), Load(0, 0, 0.0, 0.0)]


async def test_any_replay_continues_the_log_of_the_request() -> None:
    original = continuation(PROMPT, 8, 256)
    for k in range(8):
        log = RequestLog("r", PROMPT, tokens=original[:k])
        log.assign("worker")
        engine = engine_in(VirtualTime())
        await engine.submit(work(token_ids=[*PROMPT, *original[:k]], position=k, max_tokens=8 - k))
        for delta in deltas_of(await steps_until_finished(engine)):
            assert log.accept(delta) == (Verdict.ACCEPTED, 0)
        assert log.tokens == original


async def test_priority_and_arrival_decide_who_is_first() -> None:
    engine = engine_in(VirtualTime(), replace(SETTINGS, mocker_max_num_seqs=1))
    await engine.submit(work("late", max_tokens=1, arrival_time=2.0))
    await engine.submit(work("early", max_tokens=1, arrival_time=1.0))
    await engine.submit(work("urgent", max_tokens=1, arrival_time=3.0, priority=-1))
    steps = await steps_until_finished(engine, requests=3)
    assert [delta.request_id for step in steps for delta in step.deltas] == ["urgent", "early", "late"]


async def test_the_cache_is_not_shared_across_salts() -> None:
    engine = engine_in(VirtualTime())
    for name, salt in (("a", "one"), ("b", "other"), ("c", "one")):
        await engine.submit(work(name, max_tokens=1, cache_salt=salt))
    step = await engine.step()
    assert [delta.cached_tokens for delta in step.deltas] == [0, 0, 4]


async def test_adapters_share_neither_cache_nor_tokens() -> None:
    engine = engine_in(VirtualTime())
    adapters = {"base": None, "a": "pirate", "b": "robot"}
    for turn in ("first", "again"):
        for name, adapter in adapters.items():
            await engine.submit(work(f"{turn} {name}", adapter=adapter))
        steps = await steps_until_finished(engine, requests=3)
        for name, adapter in adapters.items():
            deltas = deltas_of(steps, f"{turn} {name}")
            assert [delta.token_ids[0] for delta in deltas] == continuation(PROMPT, 4, 256, adapter)
            assert deltas[0].cached_tokens == (0 if turn == "first" else 4)
    assert len({tuple(continuation(PROMPT, 4, 256, adapter)) for adapter in adapters.values()}) == 3


async def test_what_is_cached_depends_on_the_adapter() -> None:
    engine = engine_in(VirtualTime())
    await engine.submit(work(adapter="pirate"))
    await steps_until_finished(engine)
    cached = {}
    for adapter in (None, "pirate", "robot"):
        prefix = engine.prefix(PROMPT, None, adapter)
        assert prefix is not None
        cached[adapter] = await engine.cached(prefix)
    assert cached == {None: 0, "pirate": 1, "robot": 0}


async def test_logprobs_are_given_if_asked_for() -> None:
    engine = engine_in(VirtualTime())
    await engine.submit(work("with", logprobs=3))
    await engine.submit(work("without"))
    step = await engine.step()
    (with_logprobs,), (without,) = deltas_of([step], "with"), deltas_of([step], "without")
    assert with_logprobs.logprobs is not None
    assert with_logprobs.logprobs.token_ids.shape == (1, 4)
    assert without.logprobs is None


async def test_the_stop_token_is_told_as_the_reason() -> None:
    engine = engine_in(VirtualTime())
    token_id = continuation(PROMPT, 1, 256)[0]
    await engine.submit(work(stop_token_ids=[token_id]))
    (delta,) = deltas_of(await steps_until_finished(engine))
    assert (delta.finish, delta.stop_reason, delta.token_ids) == ("stop", token_id, [token_id])


async def test_a_refused_request_leaves_nothing_behind() -> None:
    engine = engine_in(VirtualTime())
    for refused in (work(token_ids=[]), work(token_ids=[1] * 64), work(n=2)):
        with pytest.raises(RequestError):
            await engine.submit(refused)
    await engine.submit(work())
    assert len(deltas_of(await steps_until_finished(engine))) == 4


async def test_the_same_epoch_is_not_worked_on_twice() -> None:
    engine = engine_in(VirtualTime())
    await engine.submit(work())
    with pytest.raises(RequestError, match="r#1 is being worked on already"):
        await engine.submit(work())
    await engine.submit(work(epoch=2))
    steps = await steps_until_finished(engine, requests=2)
    assert sorted(delta.epoch for delta in deltas_of(steps)) == [1] * 4 + [2] * 4


async def test_step_waits_for_work() -> None:
    engine = engine_in(VirtualTime())
    step = asyncio.create_task(engine.step())
    await asyncio.sleep(0)
    assert not step.done()
    await engine.submit(work())
    assert len((await step).deltas) == 1


async def test_others_run_while_steps_take_no_time() -> None:
    free = replace(SETTINGS, mocker_step_base_ms=0.0, mocker_prefill_us_per_token=0.0, mocker_decode_us_per_seq=0.0)
    engine = MockerEngine(free)
    await engine.submit(work(max_tokens=50))
    cancelled = asyncio.create_task(engine.cancel([RequestEpoch("r", 1)]))
    step = await engine.step()
    assert cancelled.done()
    assert step.deltas == ()


def test_neither_vllm_nor_torch_nor_numpy_is_imported() -> None:
    code = "import sys, dynamo_local.engine.mocker.engine; print({'vllm', 'torch', 'numpy'} & set(sys.modules))"
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert printed.strip() == "set()"
