"""Named tasks with a guard: the failure of a background task is noticed at once, and ends its process. Also: work that
is finished though its task is cancelled, and several works at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

_T = TypeVar("_T")


class TaskGuard:
    """Owns the background tasks of one process.

    A task that raises makes `failed()` raise the same exception. All tasks that nobody awaits are created here.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._failure: asyncio.Future[None] | None = None
        self._listeners: list[Callable[[BaseException], None]] = []

    def spawn(self, name: str, coro: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run `coro` as a task called `name`. To be called in the event loop."""
        task = asyncio.get_running_loop().create_task(coro, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    async def failed(self) -> None:
        """Wait until a task fails, then raise its exception. Never returns."""
        await asyncio.shield(self._outcome())

    def on_failure(self, listener: Callable[[BaseException], None]) -> None:
        """Call `listener` with the exception as soon as the first task fails."""
        self._listeners.append(listener)

    async def close(self, deadline_s: float = 5.0) -> list[str]:
        """Cancel all tasks and wait for them. Failures are not reported any more. Returns the names of the tasks that
        have not ended after `deadline_s`."""
        self._listeners.clear()
        tasks = {task for task in self._tasks if task is not asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if not tasks:
            return []
        _, pending = await asyncio.wait(tasks, timeout=deadline_s)
        return sorted(task.get_name() for task in pending)

    def _outcome(self) -> asyncio.Future[None]:
        if self._failure is None:
            self._failure = asyncio.get_running_loop().create_future()
        return self._failure

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        outcome = self._outcome()
        if error is not None and not outcome.done():
            outcome.set_exception(error)
            # Retrieved, or asyncio reports the failure as well where nobody awaits it (in a process that is ending).
            outcome.exception()
            for listener in self._listeners:
                listener(error)


async def unless(happens: Coroutine[Any, Any, object], work: Coroutine[Any, Any, None]) -> bool:
    """Do the work, and cancel it if the other thing happens first. Returns whether it was done. Raises what the work
    raises."""
    working, coming = asyncio.create_task(work), asyncio.create_task(happens)
    try:
        await asyncio.wait({working, coming}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            await working
            return True
        return False
    finally:
        for task in (working, coming):
            task.cancel()
        await asyncio.gather(working, coming, return_exceptions=True)


async def take_in_thread(take: Callable[[], _T | None], let_go: Callable[[_T], None]) -> _T | None:
    """Take something in a thread. A task that is cancelled meanwhile lets go of what was taken."""
    taken: list[_T | None] = []
    try:
        # Noted by the thread: a task that is cancelled gets no result.
        await finish_in_thread(lambda: taken.append(take()))
    except asyncio.CancelledError:
        for each in taken:
            if each is not None:
                let_go(each)
        raise
    return taken[0]


async def finish_in_thread(work: Callable[[], _T]) -> _T:
    """Run `work` in a thread, and finish it as `finish` does."""
    return await finish(asyncio.to_thread(work))


async def finish(work: Awaitable[_T]) -> _T:
    """Do the work. A task that is cancelled meanwhile waits for its end: nothing of it happens later."""
    working = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait({working})
        # Its error concerns nobody any more.
        working.exception()
        raise


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
