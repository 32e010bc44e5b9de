"""The events of an answer that is kept, as the `openai` client gets them."""

from __future__ import annotations

from typing import Any

import openai

from tests.integration.server_process import eventually


def events_after(client: openai.OpenAI, answer: str, number: int = -1, most: int = 10**9) -> list[Any]:
    """The events behind that number, at most so many, however often the connection ends before."""
    found: list[Any] = []

    def read_on() -> bool:
        after = found[-1].sequence_number if found else number
        behind = openai.omit if after < 0 else after
        try:
            with client.responses.retrieve(answer, stream=True, starting_after=behind) as stream:
                for event in stream:
                    found.append(event)
                    if len(found) >= most:
                        return True
        except openai.APIError:
            return False
        return bool(found) and found[-1].type in ("response.completed", "response.incomplete", "response.failed")

    eventually(read_on, f"the end of {answer}")
    return found


def text_of(events: list[Any]) -> str:
    return "".join(event.delta for event in events if event.type == "response.output_text.delta")
