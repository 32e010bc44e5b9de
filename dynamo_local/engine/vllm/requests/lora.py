"""LoRA adapters of one engine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.lora.utils import get_adapter_absolute_path

from dynamo_local.core.endpoints.adapters import SLOTS
from dynamo_local.core.errors import EngineError, RequestError, UsageError
from dynamo_local.core.messages.endpoints import adapter_name
from dynamo_local.engine.vllm.requests.listed_adapters import ListedAdapters
from dynamo_local.engine.vllm.settings import Adapter, ListAdapters
from dynamo_local.model.adapter import check_adapter, read_base


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
