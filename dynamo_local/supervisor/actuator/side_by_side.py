"""Does several things at the same time, and waits for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

_T = TypeVar("_T")


async def side_by_side(works: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Return the results in the order of the works. One that fails stops no other; the first error is raised once all
    have come to an end. Whoever is cancelled cancels all, and waits for them."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        if tasks:
            await asyncio.wait(tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return [task.result() for task in tasks]
