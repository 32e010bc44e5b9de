"""An answer that is kept goes on with the prompt that it was begun with, although vLLM renders it once more.

A chat template that prints the date renders another prompt on another day. The tokens are replaced before vLLM makes
its state of the request, so that its detokenizer, its counts and the engines have the same prompt.
"""

from __future__ import annotations

import hashlib
from functools import cache
from typing import Any

from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.output_processor import OutputProcessor

from dynamo_local.engine.vllm.frontend.kept_prompt import kept_prompt

_LOOKED_AT = 1000
"""Tokens of a vocabulary, spread over it, by which it is told from others."""


def keep_prompts(processor: OutputProcessor) -> None:
    """Replace `add_request` of this processor."""
    add = processor.add_request
    vocabulary = cache(lambda: _digest(processor.tokenizer))

    def add_kept(request: EngineCoreRequest, *args: Any, **kwargs: Any) -> None:
        keep = kept_prompt.get()
        if keep is not None and request.prompt_token_ids is not None:
            request.prompt_token_ids = list(keep(request.prompt_token_ids, vocabulary()))
        add(request, *args, **kwargs)

    processor.add_request = add_kept  # type: ignore[method-assign]


def _digest(tokenizer: Any) -> str:
    """Return a digest of a tokenizer's vocabulary; empty without a tokenizer."""
    if tokenizer is None:
        return ""
    size = len(tokenizer)
    some = tokenizer.convert_ids_to_tokens(list(range(0, size, max(1, size // _LOOKED_AT))))
    return hashlib.sha256(repr((size, some)).encode()).hexdigest()
