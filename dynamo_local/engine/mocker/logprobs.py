"""Pretended log-probabilities in the shape of vLLM's."""

from __future__ import annotations

import math
import struct

from dynamo_local.core.messages.tokens import Array, Logprobs


def logprobs_of(token_id: int, candidates: int, vocab_size: int) -> Logprobs:
    """Make those of one position: the chosen token, then the `candidates` most likely ones (-1: the whole vocabulary).

    As in vLLM under greedy sampling, the chosen token is also the first of the most likely ones. The i-th
    of them has probability 2**-i, and their ids count up from the chosen one, so that no id comes twice
    among them.
    """
    count = vocab_size if candidates < 0 else candidates
    ids = [token_id, *((token_id + i) % vocab_size for i in range(count))]
    values = [-math.log(2), *(-(i + 1) * math.log(2) for i in range(count))]
    return Logprobs(
        Array("int64", (1, count + 1), struct.pack(f"<{count + 1}q", *ids)),
        Array("float32", (1, count + 1), struct.pack(f"<{count + 1}f", *values)),
        Array("int64", (1,), struct.pack("<q", 1)),
    )
