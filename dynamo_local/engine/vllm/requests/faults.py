"""Cause of a request's failure in vLLM's engine core: the request's own fault, lost state, or the engine's fault.

vLLM tells of such a request that it ended with an error, and keeps the cause to its log. The causes are known where
they arise, and travel back in a field of the request that vLLM hands on with each output and that nothing else of ours
uses, `trace_headers`. A failure without a cause is the engine's fault, and another engine may do better.

- *A grammar that cannot be compiled* is the request's own fault if this engine can compile another one, and if it is
  of the kind that this engine compiles: vLLM chooses one library for all requests of an engine, by the first of them.
  An engine that can compile nothing (no memory, no threads) is at fault itself. So it is if the request goes on from
  earlier epochs: another engine has compiled the grammar before.
- *A grammar that does not allow the output so far* of such a request cannot be attributed: the engine that brought the
  output was wrong, or what is rebuilt here is. Any other engine would find the same, so the request's state counts as
  lost, as that of a parameter that cannot be rebuilt, and the request ends with that.
- *A token that the grammar rejects* although it was sampled under the grammar is the request's own fault if the sampler
  was left no token to choose: by the grammar alone, or with `allowed_token_ids` and `bad_words`. (Of `min_tokens`, vLLM
  takes care.) Otherwise something is broken here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar, StructuredOutputOptions

_log = logging.getLogger(__name__)

Cause = Literal["request", "lost"]

_HEADER = "dynamo-local-"

_LONGEST_CAUSE = 400
"""Characters. What grammar compilers say may contain the whole grammar."""


def blame(request: Any, cause: Cause, why: str) -> None:
    """Attach a cause to the output that ends this request of vLLM's."""
    request.trace_headers = {_HEADER + cause: why}


def cause_of(headers: Mapping[str, str] | None) -> tuple[Cause | None, str]:
    """Read the cause of a request's failure, and the reason, from the `trace_headers` of its last output."""
    causes: tuple[Cause, ...] = ("request", "lost")
    for cause in causes:
        if headers and (why := headers.get(_HEADER + cause)) is not None:
            return cause, why
    return None, "the engine failed the request"


def blame_for_grammar(manager: StructuredOutputManager, request: Request, error: Exception) -> None:
    """Note whose fault it is that the request's grammar could not be compiled."""
    if request.num_output_tokens == 0 and _is_of_backend(manager, request) and _compiles(manager):
        text = " ".join(str(error).split())[:_LONGEST_CAUSE] or type(error).__name__
        blame(request, "request", f"the grammar of the structured output cannot be compiled: {text}")


def _is_of_backend(manager: StructuredOutputManager, request: Request) -> bool:
    """Whether the engine compiles grammars with the library that this one was checked with."""
    assert request.sampling_params is not None
    assert request.sampling_params.structured_outputs is not None
    wanted = request.sampling_params.structured_outputs._backend or ""
    return type(manager.backend).__name__.lower() == wanted.replace("-", "") + "backend"


def _compiles(manager: StructuredOutputManager) -> bool:
    """Whether the engine can compile a grammar of which it is known that it can be."""
    assert manager.backend is not None
    try:
        manager.backend.compile_grammar(StructuredOutputOptions.REGEX, "a")
    except Exception:  # noqa: BLE001  # grammar compilers promise nothing about what they raise
        _log.exception("this engine cannot compile any grammar")
        return False
    return True


def blame_for_token(
    manager: StructuredOutputManager,
    request: Request,
    before: Sequence[int],
    grammar_after: Callable[[Sequence[int]], StructuredOutputGrammar],
) -> None:
    """Note whose fault it is that the grammar has rejected the token after `before`, the output so far. `grammar_after`
    gives the grammar as it was then."""
    try:
        why = _why_none(manager, request, before, grammar_after)
    except Exception:  # noqa: BLE001
        # The engine's loop must not end for the sake of an explanation.
        _log.exception("the reason is not known why the grammar of request %s rejected a token", request.request_id)
        return
    if why is not None:
        blame(request, "request", why)


def _why_none(
    manager: StructuredOutputManager,
    request: Request,
    before: Sequence[int],
    grammar_after: Callable[[Sequence[int]], StructuredOutputGrammar],
) -> str | None:
    """Say why no token could follow; None if there is one."""
    assert manager.backend is not None
    assert request.sampling_params is not None
    mask = manager.backend.allocate_token_bitmask(1)
    grammar_after(before).fill_bitmask(mask, 0)
    bits = np.unpackbits(mask.numpy().view(np.uint8).reshape(-1), bitorder="little")
    by_grammar = bits[: manager.vllm_config.model_config.get_vocab_size()].astype(bool)
    if not by_grammar.any():
        return f"the grammar of the structured output allows no token after {len(before)} of them"
    if not _left(by_grammar, request.sampling_params, before).any():
        parameters = "allowed_token_ids and bad_words leave none that the grammar of the structured output allows"
        return f"after {len(before)} tokens, {parameters}"
    return None


def _left(allowed: NDArray[np.bool_], params: SamplingParams, before: Sequence[int]) -> NDArray[np.bool_]:
    """Select the allowed tokens that the request's other parameters leave."""
    left = allowed.copy()
    if params.allowed_token_ids is not None:
        listed = np.zeros_like(left)
        listed[params.allowed_token_ids] = True
        left &= listed
    for word in params.bad_words_token_ids or ():
        begin = len(before) - len(word) + 1
        if begin >= 0 and list(before[begin:]) == word[:-1]:
            left[word[-1]] = False
    return left
