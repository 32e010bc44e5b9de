"""Tokens are counted where vLLM makes outputs of them, for the HTTP request that they belong to.

This is the one place through which the tokens of all APIs pass, each once: behind it, migrated and recovered requests
are one, and what a stop string has cut off is gone; before it, a client may be gone, and its answer not be read.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine.output_processor import OutputProcessor, OutputProcessorOutput, RequestState

from dynamo_local.core.usage.tally import Tally
from dynamo_local.engine.vllm.frontend.counting import counting

_TALLY = "dynamo_tally"


def count_usage(processor: OutputProcessor) -> None:
    """Replace `add_request` and `process_outputs` of this processor."""
    add, process = processor.add_request, processor.process_outputs
    states = processor.request_states

    def add_counted(request: EngineCoreRequest, *args: Any, **kwargs: Any) -> None:
        add(request, *args, **kwargs)
        # Called in the context of the HTTP request; outputs are processed in none.
        tally, state = counting.get(), states.get(request.request_id)
        if tally is not None and state is not None:
            setattr(state, _TALLY, tally)
            tally.begin()

    def process_counted(outputs: list[EngineCoreOutput], *args: Any, **kwargs: Any) -> OutputProcessorOutput:
        # A finished request has no state afterwards, and before that there may be tokens that are cut off.
        found = [(output, states.get(output.request_id)) for output in outputs]
        processed = process(outputs, *args, **kwargs)
        for output, state in found:
            tally: Tally | None = getattr(state, _TALLY, None)
            if state is not None and tally is not None:
                tally.add(_prompt_id(state), state.prompt_len, state.num_cached_tokens, len(output.new_token_ids))
                if state.request_id not in states:
                    tally.end()
        return processed

    processor.add_request = add_counted  # type: ignore[method-assign]
    processor.process_outputs = process_counted  # type: ignore[method-assign,assignment]


def _prompt_id(state: RequestState) -> str:
    """The same for all choices of a prompt."""
    return state.request_id if state.parent_req is None else state.parent_req.request_id
