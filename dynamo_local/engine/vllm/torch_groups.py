"""One group of processes in an engine that has only one worker, instead of two for each kind of parallelism."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any


def share_process_groups() -> None:
    """Have PyTorch make no second group where there is one process only, in this process and in those forked from it.

    vLLM makes a dozen, of a process that has no other one to talk to. Each has a thread that wakes up a hundred times a
    second (https://github.com/pytorch/gloo/issues/246), on the core that computes: 1,284 times for a worker that has
    nothing to do, and as often as all else of one that decodes.
    """
    import torch

    distributed: Any = torch.distributed
    distributed.new_group = partial(_new_group, distributed, distributed.new_group)
    distributed.destroy_process_group = partial(_destroy, distributed, distributed.destroy_process_group)


def _new_group(
    distributed: Any, make: Callable[..., Any], *args: Any, backend: str | None = None, **options: Any
) -> Any:
    if distributed.get_world_size() == 1 and backend in (None, distributed.get_backend()):
        return distributed.group.WORLD
    return make(*args, backend=backend, **options)


def _destroy(distributed: Any, destroy: Callable[..., None], group: Any = None) -> None:
    # The last one to be destroyed is told by no name: until then it is somebody else's, too.
    if group is None or group is not distributed.group.WORLD:
        destroy(group)
