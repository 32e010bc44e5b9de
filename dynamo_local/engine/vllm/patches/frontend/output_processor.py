"""Outputs of a step are processed one by one, so that one that fails is the failure of one request.

vLLM's output loop ends at the first exception and fails every request there is. A request that failed on its worker
is ended here too, with the reason, where vLLM would say "Internal server error".
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from vllm.exceptions import GracefulHTTPError
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.output_processor import OutputProcessor, OutputProcessorOutput

_log = logging.getLogger(__name__)


def isolate_failures(processor: OutputProcessor, take_failure: Callable[[str], Exception | None]) -> None:
    """Replace `process_outputs` of this processor. `take_failure` gives, once, the error of a request that failed."""
    process = processor.process_outputs

    def process_each(outputs: list[EngineCoreOutput], *args: Any, **kwargs: Any) -> OutputProcessorOutput:
        to_abort: list[str] = []
        for output in outputs:
            failure = take_failure(output.request_id)
            if failure is None:
                try:
                    to_abort += process([output], *args, **kwargs).reqs_to_abort
                    continue
                except Exception:  # noqa: BLE001  # vLLM promises nothing about what it raises here
                    _log.exception("output of request %s could not be processed", output.request_id)
                    why = "the answer of the engine could not be processed"
                    failure = GracefulHTTPError(why, HTTPStatus.SERVICE_UNAVAILABLE)
            to_abort += _end_with_error(processor, output.request_id, failure)
        return OutputProcessorOutput(request_outputs=[], reqs_to_abort=to_abort)

    processor.process_outputs = process_each  # type: ignore[method-assign,assignment]


def _end_with_error(processor: OutputProcessor, request_id: str, failure: Exception) -> list[str]:
    """Forget a request, with its siblings if it is one of n, and raise `failure` in its `generate`.

    Returns the ids of the requests that workers may still be busy with.
    """
    state = processor.request_states.get(request_id)
    if state is None or state.queue is None:
        return []
    family = request_id if state.parent_req is None else state.parent_req.request_id
    aborted = processor.abort_requests([family], internal=True)
    # Put last: an exception replaces the "abort" outputs that abort_requests has just put.
    state.queue.put(failure)
    return aborted
