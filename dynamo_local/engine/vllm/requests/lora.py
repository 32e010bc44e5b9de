"""LoRA adapters of one engine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.lora.utils import get_adapter_absolute_path

from dynamo_local.core.errors import EngineError, RequestError
from dynamo_local.engine.vllm.requests.adapters import Adapter


class Adapters:
    """Adapters by name. The numbers that vLLM wants beside are of this engine only. `enabled`: it can have adapters at
    all. Raises EngineError for one whose files are not found."""

    def __init__(self, configured: Iterable[Adapter] = (), *, enabled: bool = False) -> None:
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

    @property
    def requests(self) -> tuple[LoRARequest, ...]:
        return tuple(self._requests.values())

    def request(self, name: str | None) -> LoRARequest | None:
        """Find vLLM's description of a request's adapter. Raises RequestError if there is none of that name."""
        if name is None:
            return None
        if (found := self._requests.get(name)) is None:
            raise RequestError(f"this worker has no adapter {name!r}", "name it in the workers' lora-modules as well")
        return found

    def make_room(self, args: Any) -> None:
        """Add one slot more than there are adapters to the arguments of an engine on a CPU.

        The CPU's kernels take requests without an adapter to have that of the last slot, if they are computed along
        with others that have one. Slots are filled from the first one on, and in an empty one all is zero.
        """
        args.max_loras = max(args.max_loras, len(self._requests) + 1)
        if args.max_cpu_loras is not None:
            args.max_cpu_loras = max(args.max_cpu_loras, args.max_loras)

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
