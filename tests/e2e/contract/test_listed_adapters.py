"""Adapters that an engine loads while it runs: always the listed content, within its room, and KV apart by content."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_local.core.errors import AdapterError, EngineError, RequestError

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.config import CacheConfig
from vllm.lora.request import LoRARequest
from vllm.v1.engine.exceptions import EngineDeadError

from dynamo_local.engine.vllm.kv.identity import BlockHasher
from dynamo_local.engine.vllm.requests.lora import Adapters, ListedAdapters

NAMES = ("pirate", "robot", "parrot")


class Core:
    """An engine core with slots for adapters, which fails for those whose folder is called so."""

    def __init__(self) -> None:
        self.loaded: dict[int, str] = {}
        self.loads = 0
        self.removed: list[int] = []

    async def add_lora_async(self, request: LoRARequest) -> bool:
        await asyncio.sleep(0)
        self.loads += 1
        if "broken" in request.lora_path:
            of_worker = f"Worker failed with error '{request.lora_path}: rank 64 is\n greater than 16'"
            raise ValueError(f"Call to add_lora method failed: {of_worker}, please check the stack trace above")
        self.loaded[request.lora_int_id] = request.lora_name
        return True

    async def remove_lora_async(self, number: int) -> bool:
        await asyncio.sleep(0)
        self.loaded.pop(number, None)
        self.removed.append(number)
        return True


class Listed:
    """A list that changes."""

    def __init__(self) -> None:
        self.version = 0
        self.folders: dict[str, str] = {}

    def __call__(self) -> tuple[int, dict[str, str]]:
        return self.version, self.folders

    def change(self, **folders: Path | None) -> None:
        self.version += 1
        for name, folder in folders.items():
            self.folders.pop(name, None)
            if folder is not None:
                self.folders[name] = str(folder)


class Worker:
    """A worker with such an engine core. `looks` gets an entry whenever it looks which are in use."""

    def __init__(self, room: int | None = None, *, room_within_s: float = 60.0) -> None:
        self.core = Core()
        self.listed = Listed()
        self.adapters = ListedAdapters(self.listed, room=room, room_within_s=room_within_s)
        self.in_use: list[int] = []
        self.looks: asyncio.Queue[None] = asyncio.Queue()

    async def ask(self, name: str) -> LoRARequest | None:
        await self.adapters.obtain(name, self.core, self._look)
        return self.adapters.get(name)

    def _look(self) -> list[int]:
        self.looks.put_nowait(None)
        return self.in_use


def folder(root: Path, name: str, content: bytes) -> Path:
    path = root / name
    path.mkdir(exist_ok=True, parents=True)
    (path / "weights").write_bytes(content)
    return path


async def test_it_is_loaded_once_when_it_is_asked_for(tmp_path: Path) -> None:
    worker = Worker()
    worker.listed.change(pirate=folder(tmp_path, "pirate", b"1"))
    assert worker.core.loads == 0
    found = await asyncio.gather(*(worker.ask("pirate") for _ in range(5)))
    assert len({each.lora_int_id for each in found if each is not None}) == 1
    assert worker.core.loads == 1
    assert await worker.ask("robot") is None


async def test_another_content_of_the_same_name_has_other_kv(tmp_path: Path) -> None:
    """Whether it is in another folder or in the same one."""
    worker = Worker()
    hashes = BlockHasher(CacheConfig(block_size=4))
    blocks, numbers = [], []
    for where, content in (("a", b"1"), ("b", b"1"), ("b", b"22"), ("a", b"333")):
        worker.listed.change(pirate=folder(tmp_path, where, content))
        request = await worker.ask("pirate")
        assert request is not None
        assert worker.core.loaded == {request.lora_int_id: request.lora_name}
        blocks += hashes(list(range(8)), None, request)
        numbers.append(request.lora_int_id)
    assert len(set(blocks)) == len(blocks) == 8
    assert len(set(numbers)) == 4
    # A change of the board that is none of the adapter's keeps it.
    worker.listed.change()
    assert (await worker.ask("pirate")) == request


async def test_what_requests_use_stays(tmp_path: Path) -> None:
    worker = Worker()
    worker.listed.change(pirate=folder(tmp_path, "a", b"1"))
    first = await worker.ask("pirate")
    assert first is not None
    worker.in_use = [first.lora_int_id]
    worker.listed.change(pirate=folder(tmp_path, "b", b"2"))
    second = await worker.ask("pirate")
    assert second is not None
    assert set(worker.core.loaded) == {first.lora_int_id, second.lora_int_id}
    worker.in_use = []
    worker.listed.change(pirate=None, robot=folder(tmp_path, "c", b"3"))
    third = await worker.ask("robot")
    assert third is not None
    assert set(worker.core.loaded) == {third.lora_int_id}
    assert await worker.ask("pirate") is None


async def test_beyond_the_room_a_request_fails_and_names_the_setting(tmp_path: Path) -> None:
    worker = Worker(room=2)
    worker.listed.change(**{name: folder(tmp_path, name, b"1") for name in NAMES})
    first = await worker.ask("pirate")
    await worker.ask("robot")
    with pytest.raises(RequestError, match=r"room for 2 adapters.*\n?.*max-loras") as refused:
        await worker.ask("parrot")
    assert "max-loras" in str(refused.value)
    assert len(worker.core.loaded) == 2
    worker.listed.change(robot=None)
    assert await worker.ask("parrot") is not None
    assert await worker.ask("pirate") == first


async def test_where_a_former_adapter_is_still_used_a_request_waits_for_its_slot(tmp_path: Path) -> None:
    worker = Worker(room=1)
    worker.listed.change(pirate=folder(tmp_path, "pirate", b"1"))
    first = await worker.ask("pirate")
    assert first is not None
    worker.in_use = [first.lora_int_id]
    worker.listed.change(pirate=None, robot=folder(tmp_path, "robot", b"2"))
    waiting = [asyncio.create_task(worker.ask("robot")) for _ in range(3)]
    looks = worker.looks.qsize()
    for _ in range(2):
        async with asyncio.timeout(10):
            for _ in range(looks + 3):
                await worker.looks.get()
        looks = 0
        worker.adapters.request_ended()
    assert not any(task.done() for task in waiting)
    # One that was admitted before, and is answered by it, does not wait.
    assert await worker.ask("pirate") == first
    worker.in_use = []
    worker.adapters.request_ended()
    found = await asyncio.wait_for(asyncio.gather(*waiting), 10)
    assert {None if each is None else each.lora_path for each in found} == {str(tmp_path / "robot")}
    assert set(worker.core.loaded) == {each.lora_int_id for each in found if each is not None}


async def test_a_slot_that_does_not_become_free_fails_what_waits_for_it(tmp_path: Path) -> None:
    worker = Worker(room=1, room_within_s=1.0)
    worker.listed.change(pirate=folder(tmp_path, "pirate", b"1"))
    first = await worker.ask("pirate")
    assert first is not None
    worker.in_use = [first.lora_int_id]
    worker.listed.change(pirate=None, robot=folder(tmp_path, "robot", b"2"))
    with pytest.raises(RequestError, match="requests of former adapters have left no room"):
        await worker.ask("robot")


async def test_one_that_cannot_be_loaded_is_tried_again_when_it_has_changed(tmp_path: Path) -> None:
    worker = Worker()
    worker.listed.change(pirate=folder(tmp_path, "broken", b"1"))
    for _ in range(3):
        with pytest.raises(AdapterError) as failed:
            await worker.ask("pirate")
        assert str(failed.value) == "the adapter pirate cannot be loaded: its folder: rank 64 is greater than 16"
        assert failed.value.reason == f"{tmp_path}/broken: rank 64 is greater than 16"
    assert worker.core.loads == 1
    assert worker.core.removed == [1], "what was half loaded keeps no slot"
    worker.listed.change(pirate=tmp_path / "absent")
    with pytest.raises(RequestError, match="the adapter pirate cannot be read"):
        await worker.ask("pirate")
    worker.listed.change(pirate=folder(tmp_path, "good", b"1"))
    assert await worker.ask("pirate") is not None


async def test_what_is_loaded_goes_on_without_its_folder_and_for_requests_of_before(tmp_path: Path) -> None:
    worker = Worker(room=2)
    pirate, robot = folder(tmp_path, "pirate", b"1"), folder(tmp_path, "robot", b"2")
    worker.listed.change(**{"pirate@1.1": pirate, "robot@2.1": robot})
    first = await worker.ask("pirate@1.1")
    assert first is not None
    shutil.rmtree(pirate)
    worker.listed.change()
    assert await worker.ask("pirate@1.1") == first
    assert await worker.ask("robot@2.1") is not None
    # Deleted: a request that was made before still gets it, until it is freed.
    worker.listed.change(**{"pirate@1.1": None})
    assert await worker.ask("pirate@1.1") == first
    # Its successor is never answered by it.
    worker.listed.change(**{"pirate@3.1": pirate})
    with pytest.raises(RequestError, match="the adapter pirate cannot be read"):
        await worker.ask("pirate@3.1")
    folder(tmp_path, "pirate", b"1")
    second = await worker.ask("pirate@3.1")
    assert second is not None
    assert second.lora_name != first.lora_name
    assert await worker.ask("pirate@1.1") is None
    adapters = Adapters(enabled=True, listed=worker.listed)
    with pytest.raises(RequestError, match="the adapter pirate was deleted or replaced after the request began"):
        adapters.request("pirate@1.1")


async def test_files_that_change_while_they_are_loaded_are_not_taken(tmp_path: Path) -> None:
    worker = Worker()
    pirate = folder(tmp_path, "pirate", b"1")
    status = (pirate / "weights").stat()
    worker.listed.change(pirate=pirate)

    async def load(request: LoRARequest) -> bool:
        # Of the same size, and with the time of the former.
        (pirate / "weights").write_bytes(b"2")
        os.utime(pirate / "weights", ns=(status.st_atime_ns, status.st_mtime_ns))
        return await Core.add_lora_async(worker.core, request)

    changing = SimpleNamespace(add_lora_async=load, remove_lora_async=worker.core.remove_lora_async)
    with pytest.raises(RequestError, match="the adapter pirate was changed while it was loaded; send"):
        await worker.adapters.obtain("pirate", changing, lambda: [])
    assert worker.core.loaded == {}
    assert await worker.ask("pirate") is not None


async def test_a_dead_engine_is_no_fault_of_the_adapter(tmp_path: Path) -> None:
    async def die(_: object) -> bool:
        raise EngineDeadError

    worker = Worker()
    worker.listed.change(pirate=folder(tmp_path, "pirate", b"1"))
    with pytest.raises(EngineError):
        await worker.adapters.obtain("pirate", SimpleNamespace(add_lora_async=die), lambda: [])


@pytest.fixture(scope="module")
def contents(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("contents")
    return [folder(root, f"{number}", b"x" * number) for number in range(3)]


changes = st.tuples(st.sampled_from(NAMES), st.none() | st.integers(0, 2))
steps = st.lists(st.tuples(st.lists(changes, max_size=2), st.lists(st.sampled_from(NAMES), max_size=4)), max_size=8)


@settings(max_examples=60, deadline=None)
@given(steps, st.integers(1, 3), st.data())
def test_each_request_gets_what_is_listed_and_the_room_is_kept(
    contents: list[Path], steps: list[tuple[list[tuple[str, int | None]], list[str]]], room: int, data: st.DataObject
) -> None:
    async def run() -> None:
        worker = Worker(room, room_within_s=0.1)
        for changed, asked in steps:
            for name, content in changed:
                worker.listed.change(**{name: None if content is None else contents[content]})
            found = await asyncio.gather(*map(worker.ask, asked), return_exceptions=True)
            for name, request in zip(asked, found, strict=True):
                check(worker, name, request)
            assert len(worker.core.loaded) <= room
            assert set(worker.in_use) <= set(worker.core.loaded)
            worker.in_use = data.draw(
                st.lists(st.sampled_from([*worker.core.loaded]), max_size=2) if worker.core.loaded else st.just([])
            )

    def check(worker: Worker, name: str, request: Any) -> None:
        if isinstance(request, RequestError):
            assert "max-loras" in str(request) or "former adapters" in str(request)
        elif name in worker.listed.folders:
            assert request is not None
            assert request.lora_path == worker.listed.folders[name]

    asyncio.run(run())


@pytest.mark.parametrize(("given", "slots", "room"), [(None, 5, 4), (1, 2, 1), (3, 4, 3)])
def test_slots_for_adapters_to_come(given: int | None, slots: int, room: int) -> None:
    """On a CPU the last one stays empty (Adapters.make_room)."""
    adapters = Adapters(enabled=True, listed=Listed())
    args = SimpleNamespace(max_loras=given or 1, max_cpu_loras=None)
    if given is None:
        adapters.leave_slots(args)
    adapters.make_room(args)
    assert (args.max_loras, adapters.listed.room if adapters.listed else None) == (slots, room)


async def test_an_engine_without_lora_says_so(tmp_path: Path) -> None:
    listed = Listed()
    listed.change(pirate=folder(tmp_path, "pirate", b"1"))
    adapters = Adapters(enabled=False, listed=listed)
    with pytest.raises(RequestError, match="enable-lora"):
        await adapters.obtain("pirate", Core(), lambda: [])
    assert await adapters.obtain(None, Core(), lambda: []) is None
