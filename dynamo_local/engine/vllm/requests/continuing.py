"""Output of a request's earlier epochs, and the state of its grammar after that output.

patches/requests.py gives both to vLLM.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar
from vllm.v1.structured_output.request import StructuredOutputRequest

from dynamo_local.engine.vllm.requests.wire import ACCEPTED


class NotAllowedError(ValueError):
    """A grammar does not allow the output of earlier epochs."""


@dataclass
class _Replay:
    """Part of a request that the state of its grammar depends on, as it was at each of its tokens."""

    request_id: str
    prompt_token_ids: list[int] | None
    all_token_ids: list[int]
    structured_output_request: StructuredOutputRequest
    use_structured_output: bool = True


def accepted_tokens(params: SamplingParams | None) -> list[int]:
    """Output tokens of earlier epochs. Only wire.py sets them."""
    extra = None if params is None else params.extra_args
    found: list[int] = extra.get(ACCEPTED, []) if extra else []
    return found


def replay_grammar(
    manager: StructuredOutputManager, request: Request, output: Sequence[int], grammar: StructuredOutputGrammar
) -> StructuredOutputRequest:
    """Advance a fresh grammar, and the state of the reasoning before it, to the end of `output`. Returns the latter.

    Token by token, as they were generated: with a reasoning parser, the tokens decide on the way which of them are the
    grammar's. Raises NotAllowedError for output that the grammar does not allow.
    """
    structured, prompt = request.structured_output_request, request.prompt_token_ids
    assert structured is not None
    assert prompt is not None
    ours = dataclasses.replace(structured, _grammar=grammar)
    so_far = _Replay(request.request_id, prompt, list(prompt), ours)
    for token in output:
        so_far.all_token_ids.append(token)
        if not manager.accept_tokens(so_far, [token]):  # type: ignore[arg-type]
            raise NotAllowedError("the grammar does not allow what the request has brought so far")
    return ours
