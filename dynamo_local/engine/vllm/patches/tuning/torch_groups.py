"""A single process group, without a thread, in an engine that has only one worker.

vLLM makes two groups for each kind of parallelism, and each has a thread.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from dynamo_local.engine.vllm.patches.check import applies

_GLOO = "gloo"


def share_process_groups() -> None:
    """Have PyTorch make one group where there is one process only, in this process and in those forked from it.

    vLLM makes a dozen, of a process that has no other one to talk to. Each has a thread that wakes up a hundred times a
    second (https://github.com/pytorch/gloo/issues/246), on the core that computes: 1,284 times for a worker that has
    nothing to do, and as often as all else of one that decodes.
    """
    if not applies("one process group for a lone worker"):
        return
    import torch

    distributed: Any = torch.distributed
    distributed.init_process_group = partial(_init, distributed, distributed.init_process_group)
    distributed.new_group = partial(_new_group, distributed, distributed.new_group)
    distributed.destroy_process_group = partial(_destroy, distributed, distributed.destroy_process_group)


def _init(
    distributed: Any,
    make: Callable[..., None],
    backend: str | None = None,
    *args: Any,
    world_size: int = -1,
    **options: Any,
) -> None:
    if world_size == 1 and backend == _GLOO and _has_backend_without_thread():
        backend = distributed.Backend.FAKE
    make(backend, *args, world_size=world_size, **options)


def _has_backend_without_thread() -> bool:
    """Whether PyTorch has the backend that its own tests use, which talks to nobody: right for a single process. It is
    no documented interface; without it gloo is used."""
    try:
        # Makes the backend known.
        import torch.testing._internal.distributed.fake_pg  # noqa: F401
    except ImportError:
        return False
    return True


def _new_group(
    distributed: Any, make: Callable[..., Any], *args: Any, backend: str | None = None, **options: Any
) -> Any:
    if distributed.get_world_size() == 1 and backend in (None, *_names_of_world(distributed)):
        return distributed.group.WORLD
    return make(*args, backend=backend, **options)


def _names_of_world(distributed: Any) -> tuple[str, ...]:
    """Names of the backend that the group has, and of the one that was asked for."""
    has: str = distributed.get_backend()
    return (has, _GLOO) if has == distributed.Backend.FAKE else (has,)


def _destroy(distributed: Any, destroy: Callable[..., None], group: Any = None) -> None:
    # The last destruction names no group. Until then the group is in use under other names, too.
    if group is None or group is not distributed.group.WORLD:
        destroy(group)
