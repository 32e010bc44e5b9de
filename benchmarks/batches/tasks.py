"""Asynchronous tasks that are to survive, ordered however many wait already, and judged."""

from __future__ import annotations

import asyncio
from typing import Any

from benchmarks.batches.client import (
    ALL_WITHIN_S,
    BATCHES,
    LOOK_EVERY_S,
    MODEL,
    PROMPTS,
    WITHIN_S,
    Api,
    PatientClient,
    prompt_of,
    text_of,
)
from benchmarks.harness.servers import Server


class TaskWork(PatientClient):
    """Tasks of one server."""

    async def run(self, number: int, at_once: int) -> None:
        """Order so many tasks, however many wait already, and judge each. `at_once`: that are asked for."""
        ordered: asyncio.Queue[tuple[str, Api, str]] = asyncio.Queue()
        numbers = iter(range(number))

        async def order() -> None:
            for each in numbers:
                api, prompt = BATCHES[each % len(BATCHES)], prompt_of(each % PROMPTS)
                ordered.put_nowait((await self._ordered(api, prompt), api, prompt))

        async def judge() -> None:
            while True:
                found = await ordered.get()
                try:
                    async with asyncio.timeout(ALL_WITHIN_S):
                        await self._task(*found)
                except TimeoutError:
                    self.tally.faults["a task has not ended in time"] += 1
                ordered.task_done()

        async with asyncio.TaskGroup() as group:
            judges = [group.create_task(judge()) for _ in range(at_once)]
            async with asyncio.TaskGroup() as orders:
                for _ in range(at_once):
                    orders.create_task(order())
            await ordered.join()
            for each in judges:
                each.cancel()

    async def left(self, server: Server) -> None:
        """Judge the tasks whose creation was cut off before their id came: they have a result as well."""
        async with asyncio.timeout(WITHIN_S):
            while await server.dynamo("task", "list"):  # noqa: ASYNC110  # a foreign process
                await asyncio.sleep(LOOK_EVERY_S)
        left = await server.dynamo("task", "list", "--all")
        for task in left:
            if task["status"] != "SUCCESS":
                self.tally.faults[f"a task whose creation was cut off is {task['status']}"] += 1
        if len(left) > self.tally.unconfirmed:
            self.tally.faults["a task was made that nobody has ordered"] += len(left) - self.tally.unconfirmed

    async def _ordered(self, api: Api, prompt: str) -> str:
        args = {key: value for key, value in self._body(api, prompt).items() if key != "model"}
        path = f"/async-tasks?model_endpoint_id={MODEL}"
        made = await self._created(lambda: self._client.post(path, body={"args": args}, cast_to=dict[str, Any]))
        return str(made["task_id"])

    async def _task(self, name: str, api: Api, prompt: str) -> None:
        path = f"/async-tasks/{name}"
        while True:
            found = await self._until(lambda: self._client.get(path, cast_to=dict[str, Any]))
            if found["status"] not in ("PENDING", "STARTED"):
                break
            await asyncio.sleep(LOOK_EVERY_S)
        again = await self._until(lambda: self._client.get(path, cast_to=dict[str, Any]))
        if found["status"] != "SUCCESS":
            self.tally.faults[f"a task is {found['status']}: {found['status_code']} {found['traceback']}"] += 1
        elif again != found:
            self.tally.faults["a task has two results"] += 1
        elif text_of(found["result"]) != self._right[api, prompt]:
            self.tally.faults["a task has another text than undisturbed"] += 1
        else:
            self.tally.tasks += 1
        await self._gone(lambda: self._client.delete(path, cast_to=dict[str, Any]))
