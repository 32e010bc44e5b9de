"""What a client may ask for, and when it is told to come back later. Pure.

Checked before the request reaches the engine's own validation, which has no bounds on some of these.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from dynamo_local.core.request_bounds import Excess, RequestBounds, excess_of, excess_of_headers, excess_of_text

FORBIDDEN_FIELDS = frozenset({"kv_transfer_params", "ec_transfer_params", "kv_hints", "data_parallel_rank"})
"""Fields that steer the machinery (hosts, ports, block ids). Workers and frontends fill them, clients never."""


@dataclass(frozen=True)
class Limits(RequestBounds):
    """Bounds on what clients can send and how much may be under way."""

    max_body_bytes: int = field(default=8 * 1024 * 1024, metadata={"help": "largest request body, in bytes"})
    max_prompts: int = field(default=64, metadata={"help": "prompts in one request"})
    max_n: int = field(default=16, metadata={"help": "choices per prompt (n, best_of)"})
    max_candidates: int = field(default=20, metadata={"help": "candidates per position (logprobs, top_logprobs)"})
    max_requests: int = field(
        default=256, metadata={"help": "sequences (prompts x n) under way in this frontend; beyond it: 429"}
    )


@dataclass(frozen=True)
class Refusal:
    """An answer in OpenAI's error shape. `retry_after_s` becomes the Retry-After header."""

    status: Literal[400, 401, 404, 413, 429, 503]
    message: str
    kind: str
    param: str | None = None
    retry_after_s: int | None = None

    def body(self) -> bytes:
        """JSON: {"error": {message, type, param, code}}."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.status}
        return msgspec.json.encode({"error": error})


class _Asked(msgspec.Struct):
    """The fields of a generation request that have bounds. Everything else is the engine's to judge."""

    n: Any = None
    best_of: Any = None
    logprobs: Any = None
    top_logprobs: Any = None
    prompt_logprobs: Any = None
    prompt: Any = None


@dataclass(frozen=True)
class Demand:
    """How many sequences a request occupies."""

    sequences: int


_decoder = msgspec.json.Decoder(dict[str, Any])


def examine(body: bytes, limits: Limits) -> Demand | Refusal:
    """Judge the body of a generation request against the limits.

    A body that cannot be read here is refused here: the server behind reads more than JSON (NaN, UTF-16,
    numbers beyond range, lone surrogates), and what is let through unread could ask for anything.
    """
    try:
        fields = _decoder.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        return _bad(f"the body is not a JSON object: {error}", None)
    forbidden = _forbidden(fields)
    if forbidden is not None:
        return _bad(f"{forbidden} cannot be set by clients", forbidden)
    asked = msgspec.convert(fields, _Asked)
    refusal = (
        _refused(excess_of(fields, limits, limits.max_candidates))
        or _not_numbers(asked)
        or _over_bounds(asked, limits)
        or _negative(asked)
    )
    if refusal is not None:
        return refusal
    demand = Demand(_prompts(asked.prompt) * max(_int(asked.n), _int(asked.best_of), 1))
    if demand.sequences > limits.max_requests:
        return _bad(f"prompts x n must be at most {limits.max_requests}, got {demand.sequences}", "n")
    return demand


def examine_text(body: bytes, limits: Limits) -> Refusal | None:
    """Judge the body of a request that generates nothing."""
    return _refused(excess_of_text(body, limits))


def examine_headers(headers: Iterable[tuple[bytes, bytes]], limits: Limits, *, generates: bool) -> Refusal | None:
    """Judge what is known before the body is read."""
    return _refused(excess_of_headers(headers, limits, generates=generates))


def _refused(excess: Excess | None) -> Refusal | None:
    return None if excess is None else _bad(excess.message, excess.param)


def _forbidden(fields: dict[str, Any]) -> str | None:
    for name in FORBIDDEN_FIELDS:
        if fields.get(name) is not None:
            return name
    extra = fields.get("vllm_xargs")
    if isinstance(extra, dict):
        return next((name for name in FORBIDDEN_FIELDS if name in extra), None)
    return None


def _not_numbers(asked: _Asked) -> Refusal | None:
    """The server behind takes a string of digits for a number."""
    for name in ("n", "best_of", "logprobs", "top_logprobs", "prompt_logprobs"):
        if isinstance(getattr(asked, name), str):
            return _bad(f"{name} must not be a string", name)
    return None


def _over_bounds(asked: _Asked, limits: Limits) -> Refusal | None:
    bounds = (
        ("n", _int(asked.n), limits.max_n),
        ("best_of", _int(asked.best_of), limits.max_n),
        ("logprobs", _int(asked.logprobs), limits.max_candidates),
        ("top_logprobs", _int(asked.top_logprobs), limits.max_candidates),
        ("prompt_logprobs", _int(asked.prompt_logprobs), limits.max_candidates),
        ("prompt", _prompts(asked.prompt), limits.max_prompts),
    )
    for name, value, bound in bounds:
        if value > bound:
            what = "prompts in one request" if name == "prompt" else name
            return _bad(f"{what} must be at most {bound}, got {value}", name)
    return None


def _negative(asked: _Asked) -> Refusal | None:
    """The engines read a negative number as "the whole vocabulary"."""
    for name in ("logprobs", "top_logprobs", "prompt_logprobs"):
        if _int(getattr(asked, name)) < 0:
            return _bad(f"{name} must not be negative, got {getattr(asked, name)}", name)
    return None


def _prompts(prompt: Any) -> int:
    """A list of strings or of token lists is many prompts; a string or one token list is one."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        return len(prompt)
    return 1


def _int(value: Any) -> int:
    """Anything but a number counts as 0 here: its type is the engine's to refuse."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 0
    return int(value) if abs(value) < 2**63 else 2**63


def _bad(message: str, param: str | None) -> Refusal:
    return Refusal(400, message, "BadRequestError", param)
