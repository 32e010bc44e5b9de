"""Work that is to survive: background answers and lines of batches, asked for by openai's own client, and judged."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import httpx2
import openai

from benchmarks.harness.servers import ServerError

_T = TypeVar("_T")

MODEL = "chat"
PROMPTS = 100
"""Different ones, each asked for again and again."""

_AGAIN_S = 0.25
_LOOK_EVERY_S = 1.0
_WITHIN_S = 600.0
"""For one answer, through all kills."""
_BATCH_WITHIN_S = 3600.0
_CUT_OFF = (openai.APIConnectionError, AttributeError)
"""What the client raises when its connection ends. (anyio asks a socket of uvloop for its peer that has closed by then,
which has none: an AttributeError.)"""
_ENDED = frozenset({"completed", "failed", "expired", "cancelled"})

Api = Literal["/v1/completions", "/v1/chat/completions", "/v1/responses"]
BATCHES: tuple[Api, ...] = ("/v1/completions", "/v1/chat/completions")


@dataclass
class Tally:
    """What came of the requests so far. `unconfirmed`: creations whose connection broke before the answer's id came;
    they were asked for again. `faults`: what was not as it had to be, in words."""

    answers: int = 0
    lines: int = 0
    unconfirmed: int = 0
    faults: Counter[str] = field(default_factory=Counter)

    @property
    def done(self) -> int:
        """Requests with one right result."""
        return self.answers + self.lines


class Work:
    """Requests of one server. `tokens`: of each answer."""

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
                    group.create_task(learn(api, _prompt(number)))

    async def answers(self, number: int, at_once: int) -> None:
        """Ask for so many answers in the background, and judge each."""
        numbers = iter(range(number))
        async with asyncio.TaskGroup() as group:
            for _ in range(at_once):
                group.create_task(self._one_after_another(numbers))

    async def batch(self, api: Api, number: int) -> None:
        """Have a batch of so many lines run, and judge each result."""
        file = await self._until(lambda: self._client.files.create(file=self._input(api, number), purpose="batch"))
        made = await self._until(
            lambda: self._client.batches.create(input_file_id=file.id, endpoint=api, completion_window="24h")
        )
        before = 0
        async with asyncio.timeout(_BATCH_WITHIN_S):
            while (batch := await self._until(lambda: self._client.batches.retrieve(made.id))).status not in _ENDED:
                counted = 0 if batch.request_counts is None else batch.request_counts.completed
                # Nobody is told of more than is on the disk, but after a kill of fewer, until they are counted anew.
                self.tally.lines += max(0, counted - before)
                before = max(before, counted)
                await asyncio.sleep(_LOOK_EVERY_S)
        self.tally.lines -= before
        if batch.status != "completed" or batch.error_file_id is not None or batch.output_file_id is None:
            self.tally.faults[f"a batch is {batch.status}, error file {batch.error_file_id}"] += 1
            return
        output = batch.output_file_id
        content = await self._until(lambda: self._client.files.content(output))
        self._judge(api, number, content.text)

    # Answers

    async def _one_after_another(self, numbers: Iterator[int]) -> None:
        for number in numbers:
            try:
                async with asyncio.timeout(_WITHIN_S):
                    await self._answer(number)
            except TimeoutError:
                self.tally.faults["an answer has not ended in time"] += 1

    async def _answer(self, number: int) -> None:
        prompt = _prompt(number % PROMPTS)
        name = await self._create(prompt)
        # Every other one is followed, event by event; the others are asked for from time to time.
        text = await (self._followed(name) if number % 2 else self._polled(name))
        kept = await self._until(lambda: self._client.responses.retrieve(name))
        right = self._right["/v1/responses", prompt]
        if kept.status != "incomplete":
            self.tally.faults[f"an answer is {kept.status}: {kept.error and kept.error.message}"] += 1
        elif text != right or kept.output_text != right:
            self.tally.faults["an answer has another text than undisturbed"] += 1
        else:
            self.tally.answers += 1
        await self._deleted(name)

    async def _create(self, prompt: str) -> str:
        while True:
            try:
                made = await self._client.responses.create(
                    model=MODEL,
                    input=prompt,
                    background=True,
                    max_output_tokens=self._tokens,
                    temperature=0,
                    extra_body={"ignore_eos": True},
                )
            except _CUT_OFF as error:
                # What nobody has accepted cannot have begun.
                self.tally.unconfirmed += not isinstance(error.__cause__, httpx2.ConnectError)
            except openai.APIStatusError as error:
                _check_again(error)
            else:
                return made.id
            await asyncio.sleep(_AGAIN_S)

    async def _followed(self, name: str) -> str:
        """Follow the events of an answer, however often the connection ends."""
        told, text = -1, ""
        while True:
            try:
                behind = openai.omit if told < 0 else told
                async with await self._client.responses.retrieve(name, stream=True, starting_after=behind) as events:
                    async for event in events:
                        if event.sequence_number != told + 1:
                            self.tally.faults["an event has another number than the next"] += 1
                        told = event.sequence_number
                        if event.type == "response.output_text.delta":
                            text += event.delta
                        elif event.type in ("response.completed", "response.incomplete", "response.failed"):
                            return text
            except openai.APIStatusError as error:
                _check_again(error)
            except (openai.APIError, httpx2.TransportError, *_CUT_OFF):
                pass
            await asyncio.sleep(_AGAIN_S)

    async def _polled(self, name: str) -> str:
        while True:
            answer = await self._until(lambda: self._client.responses.retrieve(name))
            if answer.status not in ("queued", "in_progress"):
                return answer.output_text
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _deleted(self, name: str) -> None:
        async def delete() -> None:
            try:
                await self._client.responses.delete(name)
            except openai.NotFoundError:
                # A server that was killed had done it.
                return

        await self._until(delete)

    # Batches

    def _input(self, api: Api, number: int) -> tuple[str, bytes]:
        lines = (
            {"custom_id": str(each), "method": "POST", "url": api, "body": self._body(api, _prompt(each % PROMPTS))}
            for each in range(number)
        )
        return "in.jsonl", b"".join(json.dumps(line).encode() + b"\n" for line in lines)

    def _judge(self, api: Api, number: int, output: str) -> None:
        results = [json.loads(line) for line in output.split("\n") if line]
        counts = Counter(result["custom_id"] for result in results)
        if counts.keys() != {str(each) for each in range(number)}:
            self.tally.faults["a line has no result"] += number - len(counts)
        for result in results:
            name = result["custom_id"]
            choice = result["response"]["body"]["choices"][0]
            text = choice["text"] if "text" in choice else choice["message"]["content"]
            if counts[name] > 1:
                self.tally.faults["a line has more than one result"] += 1
            elif text != self._right[api, _prompt(int(name) % PROMPTS)]:
                self.tally.faults["a line has another text than undisturbed"] += 1
            else:
                self.tally.lines += 1

    # Both

    def _body(self, api: Api, prompt: str) -> dict[str, Any]:
        body: dict[str, Any] = {"model": MODEL, "temperature": 0, "ignore_eos": True}
        if api == "/v1/completions":
            return {**body, "prompt": prompt, "max_tokens": self._tokens}
        if api == "/v1/responses":
            return {**body, "input": prompt, "max_output_tokens": self._tokens}
        return {**body, "messages": [{"role": "user", "content": prompt}], "max_tokens": self._tokens}

    async def _ask(self, api: Api, prompt: str) -> str:
        answer = await self._client.post(api.removeprefix("/v1"), body=self._body(api, prompt), cast_to=dict[str, Any])
        if api == "/v1/responses":
            return "".join(part["text"] for item in answer["output"] for part in item.get("content") or ())
        choice = answer["choices"][0]
        return str(choice["text"] if "text" in choice else choice["message"]["content"])

    async def _until(self, ask: Callable[[], Awaitable[_T]]) -> _T:
        """Ask until there is an answer: nobody may be there for a while. Raises what else is answered."""
        while True:
            try:
                return await ask()
            except openai.APIStatusError as error:
                _check_again(error)
            except _CUT_OFF:
                pass
            await asyncio.sleep(_AGAIN_S)


def _check_again(error: openai.APIStatusError) -> None:
    """Raise the error unless it says to try again."""
    if error.status_code not in (429, 503):
        raise ServerError(f"status {error.status_code}: {error.message}") from error


def _prompt(number: int) -> str:
    return f"prompt number {number}: the quick brown fox"
