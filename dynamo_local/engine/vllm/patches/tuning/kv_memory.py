"""The KV cache of an engine on a CPU is memory that the kernel zeroes at its first use.

vLLM writes zeros over all of it when the engine starts, a second and more for each GiB, most of a small model's start.
Memory of an anonymous mapping is zero by itself: its pages are made when a block is written for the first time.
"""

from __future__ import annotations

import mmap
import weakref
from typing import Any

from dynamo_local.engine.vllm.patches.check import applies

_LARGE = 2**20
"""Bytes from which a mapping of its own is worth its cost."""

_mappings: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
"""Mappings of the KV cache that this process has made. Their tensors keep them."""


def zero_kv_at_first_use() -> None:
    """Have engines on a CPU map their KV cache, in this process and in those forked from it."""
    if not applies("KV memory zeroed at first use"):
        return
    import torch
    from vllm.v1.worker import utils

    changed: Any = utils
    changed.torch = _Torch(torch)


def give_back_kv() -> int:
    """Give the pages of this process' KV cache back to the system: it is zero again, and its pages are made anew at
    their next use. Returns its size in bytes."""
    for memory in _mappings:
        memory.madvise(mmap.MADV_DONTNEED)
    return sum(map(len, _mappings))


class _Torch:
    """Stand in for the module `torch` where vLLM allocates the KV cache: all of it as it is, except one function."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)

    def zeros(self, *size: Any, dtype: Any = None, device: Any = None, **options: Any) -> Any:
        """Return a tensor of zeros: for many bytes on a CPU, one whose memory has not been touched."""
        on_cpu = device is not None and self._torch.device(device).type == "cpu"
        (length, *more) = size
        if options or more or dtype is not self._torch.int8 or not on_cpu or not isinstance(length, int):
            return self._torch.zeros(*size, dtype=dtype, device=device, **options)
        if length < _LARGE:
            return self._torch.zeros(length, dtype=dtype, device=device)
        # The tensor keeps the mapping.
        memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        _mappings.add(memory)
        return self._torch.frombuffer(memory, dtype=dtype, count=length)
