"""Background answers and lines of batches that are to survive, asked for by openai's own client, and judged."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator

import httpx2
import openai

from benchmarks.batches.client import (
    AGAIN_S,
    ALL_WITHIN_S,
    CUT_OFF,
    LOOK_EVERY_S,
    MODEL,
    PROMPTS,
    WITHIN_S,
    Api,
    PatientClient,
    check_again,
    prompt_of,
    text_of,
)

_ENDED = frozenset({"completed", "failed", "expired", "cancelled"})


class Work(PatientClient):
    """Answers and lines of one server."""

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
        async with asyncio.timeout(ALL_WITHIN_S):
            while (batch := await self._until(lambda: self._client.batches.retrieve(made.id))).status not in _ENDED:
                counted = 0 if batch.request_counts is None else batch.request_counts.completed
                # Nobody is told of more than is on the disk, but after a kill of fewer, until they are counted anew.
                self.tally.lines += max(0, counted - before)
                before = max(before, counted)
                await asyncio.sleep(LOOK_EVERY_S)
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
                async with asyncio.timeout(WITHIN_S):
                    await self._answer(number)
            except TimeoutError:
                self.tally.faults["an answer has not ended in time"] += 1

    async def _answer(self, number: int) -> None:
        prompt = prompt_of(number % PROMPTS)
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
        await self._gone(lambda: self._client.responses.delete(name))

    async def _create(self, prompt: str) -> str:
        made = await self._created(
            lambda: self._client.responses.create(
                model=MODEL,
                input=prompt,
                background=True,
                max_output_tokens=self._tokens,
                temperature=0,
                extra_body={"ignore_eos": True},
            )
        )
        return made.id

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
                check_again(error)
            except (openai.APIError, httpx2.TransportError, *CUT_OFF):
                pass
            await asyncio.sleep(AGAIN_S)

    async def _polled(self, name: str) -> str:
        while True:
            answer = await self._until(lambda: self._client.responses.retrieve(name))
            if answer.status not in ("queued", "in_progress"):
                return answer.output_text
            await asyncio.sleep(LOOK_EVERY_S)

    # Batches

    def _input(self, api: Api, number: int) -> tuple[str, bytes]:
        lines = (
            {"custom_id": str(each), "method": "POST", "url": api, "body": self._body(api, prompt_of(each % PROMPTS))}
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
            text = text_of(result["response"]["body"])
            if counts[name] > 1:
                self.tally.faults["a line has more than one result"] += 1
            elif text != self._right[api, prompt_of(int(name) % PROMPTS)]:
                self.tally.faults["a line has another text than undisturbed"] += 1
            else:
                self.tally.lines += 1
