"""vLLM's arrays as the messages of the bus have them, both ways. Numbers stay exact: arrays travel as their bytes."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.v1.outputs import LogprobsTensors

from dynamo_local.core.messages.tokens import Array, Logprobs


def pack_logprobs(
    token_ids: NDArray[np.generic], logprobs: NDArray[np.generic], ranks: NDArray[np.generic]
) -> Logprobs:
    """vLLM's arrays as the message has them: shapes (n, k+1), (n, k+1), (n,)."""
    return Logprobs(_pack(token_ids, "int64"), _pack(logprobs, "float32"), _pack(ranks, "int64"))


def _pack(array: NDArray[np.generic], dtype: str) -> Array:
    exact = np.ascontiguousarray(array, dtype=dtype)
    return Array(dtype=dtype, shape=exact.shape, data=exact.tobytes())  # type: ignore[arg-type]


def _unpack(array: Array) -> NDArray[np.generic]:
    return np.frombuffer(array.data, dtype=array.dtype).reshape(array.shape)


def unpack_logprobs(logprobs: Logprobs) -> tuple[NDArray[np.generic], NDArray[np.generic], NDArray[np.generic]]:
    """Inverse of `pack_logprobs`."""
    return _unpack(logprobs.token_ids), _unpack(logprobs.logprobs), _unpack(logprobs.ranks)


def logprobs_tensors(logprobs: Logprobs | None) -> LogprobsTensors | None:
    """Log-probabilities of a prompt as vLLM's output processor takes them."""
    if logprobs is None:
        return None
    # Copied: torch wants arrays that it may write to, the message's bytes are not.
    token_ids, values, ranks = (torch.from_numpy(array.copy()) for array in unpack_logprobs(logprobs))
    return LogprobsTensors(token_ids, values, ranks)


def as_array(tensor: torch.Tensor) -> NDArray[np.generic]:
    """A tensor's numbers, in the memory of the machine."""
    array: NDArray[np.generic] = tensor.cpu().numpy()
    return array


def pack_pooled(output: torch.Tensor) -> Array:
    """A pooled output as it travels: in float32, which has every number of the smaller data types."""
    return _pack(np.atleast_1d(as_array(output.to(torch.float32))), "float32")


def unpack_pooled(array: Array) -> torch.Tensor:
    """Inverse of `pack_pooled`."""
    # Copied, as above.
    return torch.from_numpy(_unpack(array).copy())
