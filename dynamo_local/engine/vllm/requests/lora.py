"""LoRA adapters of one engine: those that it is configured with, and those of a list, which it loads while it runs.
Imports vLLM."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.lora.utils import get_adapter_absolute_path
from vllm.v1.engine.exceptions import EngineDeadError

from dynamo_local.core.endpoints.adapters import SLOTS
from dynamo_local.core.errors import AdapterError, EngineError, RequestError, UsageError
from dynamo_local.core.messages.endpoints import adapter_name
from dynamo_local.engine.vllm.settings import Adapter, ListAdapters
from dynamo_local.model.adapter import check_adapter, read_base
from dynamo_local.model.weights import files_identity


class Adapters:
    """Adapters by name. The numbers that vLLM wants beside are of this engine only. `enabled`: it can have adapters at
    all. `listed`: others, which it loads while it runs. Raises EngineError for one whose files are not found."""

    def __init__(
        self, configured: Iterable[Adapter] = (), *, enabled: bool = False, listed: ListAdapters | None = None
    ) -> None:
        self.enabled = enabled
        self._requests = {
            adapter.name: LoRARequest(
                adapter.name,
                number,
                _folder(adapter),
                is_3d_lora_weight=adapter.is_3d_lora_weight,
            )
            for number, adapter in enumerate(configured, 1)
        }
        self.listed = None if listed is None else ListedAdapters(listed, first=len(self._requests) + 1)

    @property
    def requests(self) -> tuple[LoRARequest, ...]:
        return tuple(self._requests.values())

    def request(self, name: str | None) -> LoRARequest | None:
        """Find vLLM's description of a request's adapter. Raises RequestError if there is none of that name."""
        if name is None:
            return None
        found = self._requests.get(name)
        if found is None and self.listed is not None:
            found = self.listed.get(name)
        if found is None:
            if self.listed is not None:
                what = f"the adapter {adapter_name(name)} was deleted or replaced after the request began"
                raise RequestError(what, "send the request again")
            raise RequestError(f"this worker has no adapter {name!r}", "name it in the workers' lora-modules as well")
        return found

    async def obtain(self, name: str | None, core: Any, in_use: Callable[[], Collection[int]]) -> LoRARequest | None:
        """Have the engine core load an adapter that is listed, and return it; None if it is none of the list. Errors
        as for ListedAdapters.obtain."""
        if name is None or name in self._requests or self.listed is None:
            return None
        if not self.enabled:
            raise RequestError("this worker's engine takes no adapters", "set enable-lora where the model is served")
        await self.listed.obtain(name, core, in_use)
        return self.listed.get(name)

    def request_ended(self) -> None:
        """To be called when a request with an adapter has ended."""
        if self.listed is not None:
            self.listed.request_ended()

    def leave_slots(self, args: Any) -> None:
        """Give an engine for which no number of slots is given some for adapters of the list."""
        if self.enabled and self.listed is not None:
            args.max_loras = max(args.max_loras, SLOTS)
            if args.max_cpu_loras is not None:
                args.max_cpu_loras = max(args.max_cpu_loras, args.max_loras)

    def make_room(self, args: Any) -> None:
        """Add one slot more than there are adapters to the arguments of an engine on a CPU.

        The CPU's kernels take requests without an adapter to have that of the last slot, if they are computed along
        with others that have one. Slots are filled from the first one on, and in an empty one all is zero.
        """
        args.max_loras = max(args.max_loras + (self.listed is not None), len(self._requests) + 1)
        if self.listed is not None:
            self.listed.room = args.max_loras - 1 - len(self._requests)
        if args.max_cpu_loras is not None:
            args.max_cpu_loras = max(args.max_cpu_loras, args.max_loras)

    def check(self, model: str) -> None:
        """Raise EngineError for an adapter that vLLM would not load, or that does not fit the model in this folder."""
        base = read_base(Path(model))
        for request in self._requests.values():
            try:
                check_adapter(request.lora_name, Path(request.lora_path), base)
            except UsageError as error:
                raise EngineError(error.cause, "see lora-modules") from error

    async def load(self, core: Any) -> None:
        """Have the engine core load all of them, as far as it has room. Raises EngineError for one that it cannot."""
        for request in self._requests.values():
            try:
                await core.add_lora_async(request)
            except Exception as error:
                # vLLM promises nothing about what it raises here.
                raise _not_loaded(request.lora_name, request.lora_path, error) from error


def _folder(adapter: Adapter) -> str:
    """Find the folder of an adapter's files. They are fetched to this machine first if need be."""
    try:
        return get_adapter_absolute_path(adapter.path)
    except Exception as error:
        # Whatever the Hub's client raises, there are no files.
        raise _not_loaded(adapter.name, adapter.path, error) from error


def _not_loaded(name: str, path: str, error: Exception) -> EngineError:
    cause = " ".join(str(error).split())[:300]
    return EngineError(f"the adapter {name} in {path} cannot be loaded: {cause}", "see lora-modules")


NO_ADAPTERS = Adapters()
"""Adapters of an engine that cannot have any."""


# LoRA adapters that an engine loads while it runs: the adapters of its endpoint, when a request asks for one.
#
# A list outside says which there are, and in which folders. A name may stand for other files later, so in the engine
# core an adapter's name has a digest of its files: KV that was computed with one content is never taken for that of
# another. Requests under way keep the content with which they began. What is loaded goes on when it is not listed any
# more, for requests that began before, until its slot is needed; and when its folder has gone.

_log = logging.getLogger(__name__)

_DIGEST_CHARACTERS = 16
_LOGGED_CHARACTERS = 400
_TOLD_CHARACTERS = 200
"""Characters of what vLLM says of an adapter that clients are told."""
_CALL_FAILED = re.compile(
    r"(?:Call to add_lora method failed: )?(?:Worker failed with error '(.*)', please check the stack trace .*|(.*))"
)
"""The text of an error as vLLM's engine core has it of a worker, with what both put around it."""

ROOM_WITHIN_S = 300.0
"""For requests of an adapter that was deleted or replaced to end, where a new one needs its slot: as long as requests
are held for an endpoint without a worker."""


class _NoRoomYetError(Exception):
    """All slots are taken, some of them by adapters that are not listed any more."""


class ListedAdapters:
    """The adapters of a list, for one engine core. `first`: its number for the first of them. `room`: how many it may
    have at the same time, None for any number. `room_within_s`: for a slot to become free that will."""

    def __init__(
        self, listed: ListAdapters, *, first: int = 1, room: int | None = None, room_within_s: float = ROOM_WITHIN_S
    ) -> None:
        self._listed = listed
        self._next = first
        self.room = room
        self._room_within_s = room_within_s
        self._loading = asyncio.Lock()
        self._ended = asyncio.Event()
        """Set when a request has ended, and replaced."""
        self._current: dict[str, tuple[Hashable, LoRARequest]] = {}
        """By name, each with the version of the list by which it is known to be the right one."""
        self._loaded: dict[int, LoRARequest] = {}
        self._failed: dict[str, str] = {}
        """Why contents cannot be loaded, by their names in the engine core."""

    def get(self, name: str) -> LoRARequest | None:
        """Return the adapter if it is loaded."""
        known = self._current.get(name)
        return None if known is None else known[1]

    async def obtain(self, name: str, core: Any, in_use: Callable[[], Collection[int]]) -> None:
        """Have the engine core load the adapter, unless it has it, or it is not listed. `in_use`: numbers of adapters
        of requests under way. Where these keep a slot for an adapter that is not listed any more, wait for it.

        Raises AdapterError if it cannot be loaded as it is, RequestError if not now, EngineError if the engine core is
        dead.
        """
        try:
            async with asyncio.timeout(self._room_within_s):
                while not self._is_current(name):
                    ended = self._ended
                    try:
                        await self._obtain_next(name, core, in_use)
                    except _NoRoomYetError:
                        await ended.wait()
                    else:
                        return
        except TimeoutError as error:
            what = f"for {self._room_within_s:g} s, requests of former adapters have left no room for another"
            raise RequestError(what, "send the request again") from error

    def request_ended(self) -> None:
        """Look again for those that wait for room. To be called when a request with an adapter has ended."""
        self._ended.set()
        self._ended = asyncio.Event()

    async def _obtain_next(self, name: str, core: Any, in_use: Callable[[], Collection[int]]) -> None:
        async with self._loading:
            # Another request for it may have been first.
            if not self._is_current(name):
                await self._obtain(name, core, in_use)

    def _is_current(self, name: str) -> bool:
        known = self._current.get(name)
        return known is not None and known[0] == self._listed()[0]

    async def _obtain(self, name: str, core: Any, in_use: Callable[[], Collection[int]]) -> None:
        version, folders = self._listed()
        if (folder := folders.get(name)) is None:
            return
        known = self.get(name)
        try:
            named = await asyncio.to_thread(name_of_content, name, folder)
        except RequestError:
            if known is None or known.lora_path != folder:
                raise
            named = known.lora_name
        request = next((each for each in self._loaded.values() if each.lora_name == named), None)
        if request is None:
            request = await self._load(LoRARequest(named, self._next, folder), name, core, folders, in_use)
        self._current[name] = (version, request)
        await self._drop_stale(core, folders, in_use)

    async def _load(
        self,
        request: LoRARequest,
        name: str,
        core: Any,
        folders: Mapping[str, str],
        in_use: Callable[[], Collection[int]],
    ) -> LoRARequest:
        if (why := self._failed.get(request.lora_name)) is not None:
            raise _unloadable(name, request.lora_path, why)
        if self.room is not None and len(self._loaded) >= self.room:
            self._current.pop(name, None)
            await self._drop_stale(core, folders, in_use)
        if self.room is not None and len(self._loaded) >= self.room:
            listed = {known.lora_int_id for each, (_, known) in self._current.items() if each in folders}
            if not listed.issuperset(self._loaded):
                raise _NoRoomYetError
            what = f"this worker has room for {self.room} adapters, and has as many"
            raise RequestError(what, "raise max-loras of the endpoint that has the model")
        self._next += 1
        try:
            await core.add_lora_async(request)
        except EngineDeadError as error:
            raise EngineError("vLLM's engine process died", "the worker's log has the details") from error
        except Exception as error:
            # vLLM promises nothing about what it raises here.
            why = self._failed[request.lora_name] = _cause(error)
            _log.error("the adapter %s in %s cannot be loaded: %s", name, request.lora_path, why)
            # It may have been half loaded, and would keep a slot.
            await core.remove_lora_async(request.lora_int_id)
            raise _unloadable(name, request.lora_path, why) from error
        await self._check_unchanged(request, name, core)
        self._loaded[request.lora_int_id] = request
        _log.info("adapter %s was loaded as %s", name, request.lora_name)
        return request

    async def _check_unchanged(self, request: LoRARequest, name: str, core: Any) -> None:
        """Raise RequestError if other files were loaded than those of which it has its name."""
        try:
            after = await asyncio.to_thread(name_of_content, name, request.lora_path)
            if after != request.lora_name:
                what = f"the adapter {adapter_name(name)} was changed while it was loaded"
                raise RequestError(what, "send the request again")
        except RequestError:
            await core.remove_lora_async(request.lora_int_id)
            raise

    async def _drop_stale(self, core: Any, folders: Mapping[str, str], in_use: Callable[[], Collection[int]]) -> None:
        """Free the adapters that are not listed any more, or have another content now, and that nobody uses."""
        used = set(in_use())
        self._current = {
            name: known for name, known in self._current.items() if name in folders or known[1].lora_int_id in used
        }
        keep = {request.lora_int_id for _, request in self._current.values()} | used
        for number in [number for number in self._loaded if number not in keep]:
            del self._loaded[number]
            await core.remove_lora_async(number)


def _cause(error: Exception) -> str:
    found = _CALL_FAILED.fullmatch(" ".join(str(error).split()))
    text = "" if found is None else found[1] or found[2]
    return text[:_LOGGED_CHARACTERS] or type(error).__name__


def _unloadable(name: str, folder: str, why: str) -> AdapterError:
    # The client is not told of folders.
    short = why.replace(folder, "its folder")[:_TOLD_CHARACTERS]
    return AdapterError(f"the adapter {adapter_name(name)} cannot be loaded: {short}", why)


def name_of_content(name: str, folder: str) -> str:
    """Name of an adapter in an engine core, with a digest of its files. Blocks. Raises RequestError if there is no such
    folder."""
    try:
        identity = files_identity(Path(folder), strictly=True)
    except OSError as error:
        _log.error("the adapter %s in %s cannot be read: %s", name, folder, error)
        raise RequestError(f"the adapter {adapter_name(name)} cannot be read", "the worker's log says why") from error
    digest = hashlib.sha256(f"{folder}\0{identity}".encode()).hexdigest()
    return f"{name}#{digest[:_DIGEST_CHARACTERS]}"
