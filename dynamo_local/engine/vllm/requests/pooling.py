"""Requests to pooling models (embeddings, classes, scores), as they travel on the bus.

The answer comes in one step and has no tokens: after a loss the request is computed again from its prompt.
"""

from __future__ import annotations

import msgspec
from vllm.exceptions import VLLMClientError
from vllm.pooling_params import PoolingParams
from vllm.tasks import SupportedTask

from dynamo_local.core.errors import BadRequestError, RequestError
from dynamo_local.core.ports import Sampling

_decoder = msgspec.msgpack.Decoder(PoolingParams)
_encoder = msgspec.msgpack.Encoder()


def pack_params(params: PoolingParams) -> Sampling:
    """Encode a client's parameters. Raises BadRequestError for what cannot be carried."""
    if params.late_interaction_params is not None:
        # The documents of a request would have to be computed by the engine that has kept its query.
        raise BadRequestError("scores of late interaction are computed in the frontend here, not in the engine")
    if params.extra_kwargs:
        raise BadRequestError("arguments of plugins are not supported")
    packed = _encoder.encode(params)

    def encode(position: int, at_most: int | None = None) -> bytes:
        return packed

    return encode


def read_params(packed: bytes, tasks: tuple[SupportedTask, ...] | None = None) -> PoolingParams:
    """Inverse of `pack_params`. `tasks` are those of the engine, which would end at any other. Raises RequestError."""
    try:
        params = _decoder.decode(packed)
    except VLLMClientError as error:
        raise BadRequestError(str(error)) from error
    except (msgspec.DecodeError, ValueError) as error:
        raise RequestError(f"the pooling parameters cannot be read: {error}") from error
    if tasks is not None and params.task not in tasks:
        raise RequestError(f"this worker's engine does not do {params.task!r}, but {', '.join(tasks)}")
    return params
