"""A client of a server whose processes are killed, by openai's own: it asks again, and knows the right answers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import httpx2
import openai

from benchmarks.harness.client import ServerError

_T = TypeVar("_T")

MODEL = "chat"
PROMPTS = 100
"""Different ones, each asked for again and again."""

LOOK_EVERY_S = 1.0
WITHIN_S = 600.0
"""For one answer, through all kills."""
ALL_WITHIN_S = 3600.0
"""For all lines of a batch, and all tasks."""
AGAIN_S = 0.25
CUT_OFF = (openai.APIConnectionError, AttributeError)
"""What the client raises when its connection ends. (anyio asks a socket of uvloop for its peer that has closed by then,
which has none: an AttributeError.)"""

Api = Literal["/v1/completions", "/v1/chat/completions", "/v1/responses"]
BATCHES: tuple[Api, ...] = ("/v1/completions", "/v1/chat/completions")


@dataclass
class Tally:
    """What came of the requests so far. `unconfirmed`: creations whose connection broke before the answer's id came;
    they were asked for again. `faults`: what was not as it had to be, in words."""

    answers: int = 0
    lines: int = 0
    tasks: int = 0
    unconfirmed: int = 0
    faults: Counter[str] = field(default_factory=Counter)

    @property
    def done(self) -> int:
        """Requests with one right result."""
        return self.answers + self.lines + self.tasks


class PatientClient:
    """Asks one server. `tokens`: of each answer."""

    def __init__(self, url: str, tokens: int) -> None:
        self.tally = Tally()
        self._tokens = tokens
        self._client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=60.0, max_retries=0)
        self._right: dict[tuple[Api, str], str] = {}

    async def close(self) -> None:
        await self._client.close()

    async def learn(self) -> None:
        """Learn the answers of the undisturbed server. Raises ServerError if they differ from one time to the next."""
        room = asyncio.Semaphore(8)

        async def learn(api: Api, prompt: str) -> None:
            async with room:
                texts = [await self._ask(api, prompt) for _ in range(2)]
            if texts[0] != texts[1]:
                raise ServerError(f"{prompt!r} has two answers")
            self._right[api, prompt] = texts[0]

        async with asyncio.TaskGroup() as group:
            for number in range(PROMPTS):
                for api in (*BATCHES, "/v1/responses"):
                    group.create_task(learn(api, prompt_of(number)))

    def _body(self, api: Api, prompt: str) -> dict[str, Any]:
        body: dict[str, Any] = {"model": MODEL, "temperature": 0, "ignore_eos": True}
        if api == "/v1/completions":
            return {**body, "prompt": prompt, "max_tokens": self._tokens}
        if api == "/v1/responses":
            return {**body, "input": prompt, "max_output_tokens": self._tokens}
        return {**body, "messages": [{"role": "user", "content": prompt}], "max_tokens": self._tokens}

    async def _ask(self, api: Api, prompt: str) -> str:
        answer = await self._client.post(api.removeprefix("/v1"), body=self._body(api, prompt), cast_to=dict[str, Any])
        return text_of(answer)

    async def _until(self, ask: Callable[[], Awaitable[_T]]) -> _T:
        """Ask until there is an answer: nobody may be there for a while. Raises what else is answered."""
        while True:
            try:
                return await ask()
            except openai.APIStatusError as error:
                check_again(error)
            except CUT_OFF:
                pass
            await asyncio.sleep(AGAIN_S)

    async def _created(self, create: Callable[[], Awaitable[_T]]) -> _T:
        """Create something, and count the attempts that were cut off and may have begun."""

        async def counted() -> _T:
            try:
                return await create()
            except CUT_OFF as error:
                # What nobody has accepted cannot have begun.
                self.tally.unconfirmed += not isinstance(error.__cause__, httpx2.ConnectError)
                raise

        return await self._until(counted)

    async def _gone(self, delete: Callable[[], Awaitable[Any]]) -> None:
        """Delete what a server that was killed may have deleted already."""

        async def deleted() -> None:
            with suppress(openai.NotFoundError):
                await delete()

        await self._until(deleted)


def text_of(answer: dict[str, Any]) -> str:
    """Return the text of an answer of any of the APIs."""
    if "output" in answer:
        return "".join(part["text"] for item in answer["output"] for part in item.get("content") or ())
    choice = answer["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def check_again(error: openai.APIStatusError) -> None:
    """Raise the error unless it says to try again."""
    if error.status_code not in (429, 503):
        raise ServerError(f"status {error.status_code}: {error.message}") from error


def prompt_of(number: int) -> str:
    return f"prompt number {number}: the quick brown fox"
