"""Admission of HTTP requests: what a client may ask for, and how refusals read. Pure.

Checked before the request reaches the engine's own validation, which has no bounds on some of these.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from dynamo_local.core.http.bounds.request import Excess, RequestBounds, excess_of, excess_of_headers, fields_of_text
from dynamo_local.core.http.json_text import whole_number, why_not
from dynamo_local.core.http.waiting import HoldLimits
from dynamo_local.core.keys.values import KeyTerms
from dynamo_local.core.priority.classes import MOST_PRIORITY

FORBIDDEN_FIELDS = frozenset({"kv_transfer_params", "ec_transfer_params", "kv_hints", "data_parallel_rank"})
"""Fields that steer the machinery (hosts, ports, block ids). Workers and frontends fill them, clients never."""

ALL = -1
"""Number of candidates that means the whole vocabulary; as max-candidates: no bound but max-logprobs, vLLM's own."""


@dataclass(frozen=True)
class AdmissionLimits(HoldLimits, RequestBounds):
    """Bounds on what clients can send and how much may be under way."""

    max_body_bytes: int = field(default=8 * 1024 * 1024, metadata={"help": "Maximum size of a request body, in bytes."})
    max_prompts: int = field(default=64, metadata={"help": "Maximum number of prompts in a request."})
    max_n: int = field(default=16, metadata={"help": "Maximum number of choices per prompt (n, best_of)."})
    max_inputs: int = field(
        default=2048,
        metadata={
            "help": "Maximum number of inputs of a request for embeddings, classes or scores (texts, documents)."
        },
    )
    max_input_characters: int = field(
        default=4 * 1024 * 1024,
        metadata={"help": "Maximum number of characters of all inputs of such a request."},
    )
    max_scored_characters: int = field(
        default=64 * 1024,
        metadata={
            "help": "Maximum number of characters of query and items in a scoring request. They block other requests."
        },
    )
    max_candidates: int = field(
        default=20,
        metadata={
            "help": "Maximum number of candidates per token (logprobs, top_logprobs); -1: unlimited. "
            "If only max-logprobs is set, its value applies."
        },
    )
    max_requests: int = field(
        default=256,
        metadata={
            "help": "Maximum number of sequences (prompts times n, or inputs) in flight, for each model, with all "
            "frontends together. More get status 429. Those of lower classes of priority do not count against a "
            "request, and an API key that has less than its share of them gets in beyond, up to twice the number."
        },
    )
    max_headers: int = field(
        default=128, metadata={"help": "Maximum number of headers of a request. More get status 431."}
    )
    max_header_bytes: int = field(
        default=32 * 1024,
        metadata={"help": "Maximum size of path and headers of a request, in bytes. More get status 431."},
    )
    header_timeout_s: float = field(
        default=10.0,
        metadata={"help": "Maximum time for a client to send path and headers, in s. After that it is disconnected."},
    )
    body_timeout_s: float = field(
        default=60.0,
        metadata={"help": "Maximum time for a client to send the body, in s. After that it gets status 408."},
    )
    max_connections: int = field(
        default=1024,
        metadata={
            "help": "Maximum number of open connections, of all frontends together. A further one replaces an idle "
            "one, or gets status 503."
        },
    )


@dataclass(frozen=True)
class Refusal:
    """An answer in OpenAI's error shape. `retry_after_s` becomes the Retry-After header."""

    status: Literal[400, 401, 403, 404, 405, 408, 409, 413, 415, 429, 431, 503, 507]
    message: str
    kind: str
    param: str | None = None
    retry_after_s: int | None = None
    allowed: Collection[str] = ()
    """The methods that the path takes, where another one was used."""
    code: str | None = None
    """The code in the body; None: the status."""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    """Further headers."""

    def body(self) -> bytes:
        """JSON: {"error": {message, type, param, code}}."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code or self.status}
        return msgspec.json.encode({"error": error})


class _Asked(msgspec.Struct):
    """The fields of a generation request that have bounds. Everything else is the engine's to judge."""

    n: Any = None
    best_of: Any = None
    logprobs: Any = None
    top_logprobs: Any = None
    prompt_logprobs: Any = None
    prompt: Any = None
    messages: Any = None
    query: Any = None
    items: Any = None
    label_token_ids: Any = None


_KINDS = {
    "messages": (list, "a list of messages"),
    "tools": (list, "a list"),
    "structured_outputs": (dict, "an object"),
}
"""Fields of which the server behind makes something before it has looked whether they are what they should be."""

_OTHER_PROMPTS = frozenset({"prompt", "prompt_embeds", "input"})
"""Beside one of these, `messages` is not read."""

_NUMBERS = ("n", "best_of", "logprobs", "top_logprobs", "prompt_logprobs")
_NUMBER_FIELDS = frozenset(_NUMBERS)


@dataclass(frozen=True)
class Demand:
    """Number of sequences that a request occupies."""

    sequences: int


_decoder = msgspec.json.Decoder(dict[str, Any])


def read_fields(body: bytes) -> dict[str, Any] | Refusal:
    """Read the body of a generation request.

    `body` is UTF-8. A body that cannot be read here is refused here: the server behind reads more than JSON (NaN,
    numbers beyond range, lone surrogates), and what is let through unread could ask for anything.
    """
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        return _bad(f"the body is not a JSON object: {why_not(body, error)}", None)


def examine(fields: dict[str, Any], limits: AdmissionLimits) -> Demand | Refusal:
    """Judge the fields of a generation request against the limits of the model that it asks for."""
    forbidden = _forbidden(fields)
    if forbidden is not None:
        return _bad(f"{forbidden} cannot be set by clients", forbidden)
    asked = msgspec.convert(fields, _Asked)
    has_numbers = not _NUMBER_FIELDS.isdisjoint(fields)
    prompts, inputs = _prompts(asked), number_of_inputs(fields)
    refusal = (
        _of_wrong_kind(fields)
        or _refused(excess_of(fields, limits, limits.max_candidates))
        or (_not_numbers(asked) if has_numbers else None)
        or _over_bounds(asked, prompts, limits, has_numbers)
        or (_inputs_over_bounds(fields, inputs, limits) if inputs else None)
        or (_negative(asked, limits) if has_numbers else None)
    )
    if refusal is not None:
        return refusal
    choices = max(_int(asked.n), _int(asked.best_of), 1) if has_numbers else 1
    demand = Demand(max(prompts * choices, inputs))
    if inputs > limits.max_requests:
        why = f"a request must have at most {limits.max_requests} inputs (setting max-requests), got {inputs}"
        return _bad(why, field_of_inputs(fields))
    if demand.sequences > limits.max_requests:
        why = f"prompts x n must be at most {limits.max_requests} (setting max-requests), got {demand.sequences}"
        return _bad(why, "n")
    return demand


def examine_text(body: bytes, limits: AdmissionLimits) -> dict[str, Any] | Refusal:
    """Judge the body of a request that generates nothing. Return its fields; none of a body that is no JSON object,
    which is left to the server behind."""
    found = fields_of_text(body, limits)
    return _bad(found.message, found.param) if isinstance(found, Excess) else found


def examine_tokens(fields: dict[str, Any], vocabulary: int | None) -> Refusal | None:
    """Judge token ids of which the text is asked. `vocabulary`: number of ids of the model; None: not known. What is no
    list of numbers is left to the server behind, whose text of ids that are not there is empty."""
    if vocabulary is None:
        return None
    try:
        last = min(max(fields.get("tokens") or ()), 2**63)
        is_there = last < vocabulary
    except (TypeError, ValueError):
        return None
    why = f"token {last} is not in the vocabulary, whose ids are 0 to {vocabulary - 1}"
    return None if is_there else _bad(why, "tokens")


def examine_headers(headers: Iterable[tuple[bytes, bytes]]) -> Refusal | None:
    """Judge the headers that the server behind makes something of."""
    return _refused(excess_of_headers(headers))


def _refused(excess: Excess | None) -> Refusal | None:
    return None if excess is None else _bad(excess.message, excess.param)


def _forbidden(fields: dict[str, Any]) -> str | None:
    if not FORBIDDEN_FIELDS.isdisjoint(fields):
        for name in FORBIDDEN_FIELDS:
            if fields.get(name) is not None:
                return name
    extra = fields.get("vllm_xargs")
    if isinstance(extra, dict):
        return next((name for name in FORBIDDEN_FIELDS if name in extra), None)
    return None


def _of_wrong_kind(fields: dict[str, Any]) -> Refusal | None:
    for name, (kind, what) in _KINDS.items():
        if name not in fields or isinstance(fields[name], kind):
            continue
        needed = _OTHER_PROMPTS.isdisjoint(fields) if name == "messages" else fields[name] is not None
        if needed:
            return _bad(f"{name} must be {what}{', got null' if fields[name] is None else ''}", name)
    return None


def _not_numbers(asked: _Asked) -> Refusal | None:
    for name in _NUMBERS:
        value = getattr(asked, name)
        if isinstance(value, str) and whole_number(value) is None:
            return _bad(f"{name} is a string that is no whole number", name)
    return None


def _over_bounds(asked: _Asked, prompts: int, limits: AdmissionLimits, has_numbers: bool) -> Refusal | None:
    candidates = limits.max_candidates
    bounds: list[tuple[str, str, int, int, str]] = []
    if asked.label_token_ids is not None:
        most = limits.max_scored_characters
        bounds += [
            ("label_token_ids", "label_token_ids", _length(asked.label_token_ids), candidates, "max-candidates"),
            ("items", "characters of query and items", _scored(asked), most, "max-scored-characters"),
        ]
    if prompts > limits.max_prompts:
        bounds.append((_prompt_field(asked), "prompts in one request", prompts, limits.max_prompts, "max-prompts"))
    if has_numbers:
        bounds += [
            ("n", "n", _int(asked.n), limits.max_n, "max-n"),
            ("best_of", "best_of", _int(asked.best_of), limits.max_n, "max-n"),
            ("logprobs", "logprobs", _int(asked.logprobs), candidates, "max-candidates"),
            ("top_logprobs", "top_logprobs", _int(asked.top_logprobs), candidates, "max-candidates"),
            ("prompt_logprobs", "prompt_logprobs", _int(asked.prompt_logprobs), candidates, "max-candidates"),
        ]
    for name, what, value, bound, setting in bounds:
        if value > bound and not (setting == "max-candidates" and bound == ALL):
            return _bad(f"{what} must be at most {bound} (setting {setting}), got {value}", name)
    return None


def _inputs_over_bounds(fields: dict[str, Any], inputs: int, limits: AdmissionLimits) -> Refusal | None:
    """Bound the inputs of a request for pooled outputs."""
    bounds = (
        ("inputs", inputs, limits.max_inputs, "max-inputs"),
        ("characters of all inputs", characters_of_inputs(fields), limits.max_input_characters, "max-input-characters"),
    )
    for what, value, bound, setting in bounds:
        if value > bound:
            return _bad(f"{what} must be at most {bound} (setting {setting}), got {value}", field_of_inputs(fields))
    return None


def _negative(asked: _Asked, limits: AdmissionLimits) -> Refusal | None:
    """The engines read -1 as "the whole vocabulary"."""
    for name in ("logprobs", "top_logprobs", "prompt_logprobs"):
        value = _int(getattr(asked, name))
        if value < 0 and not value == limits.max_candidates == ALL:
            return _bad(f"{name} must not be negative, got {value} (setting max-candidates)", name)
    return None


def _prompts(asked: _Asked) -> int:
    """Count the prompts of a request, in whichever field they are. Another path's field counts like its own."""
    return max(_listed(asked.prompt, (str, list)), _listed(asked.messages, list), _items(asked), 1)


def _prompt_field(asked: _Asked) -> str:
    if _items(asked) > 1:
        return "items"
    return "messages" if _listed(asked.messages, list) > 1 else "prompt"


def _listed(value: Any, kind: Any) -> int:
    """The length of a list of such elements: strings or token lists are many prompts, numbers are one."""
    return len(value) if isinstance(value, list) and value and isinstance(value[0], kind) else 0


def _items(asked: _Asked) -> int:
    """Count the items of a request for scores, which has labels as well: each item becomes a prompt."""
    return 0 if asked.label_token_ids is None else _length(asked.items)


def _scored(asked: _Asked) -> int:
    """The texts of a request for scores, which has labels: the server behind tokenizes them on its event loop."""
    texts = [asked.query, *(asked.items if isinstance(asked.items, list) else ())]
    return sum(len(text) for text in texts if isinstance(text, str))


def _length(value: Any) -> int:
    return len(value) if isinstance(value, list) else 0


def _int(value: Any) -> int:
    """A number, or a string that is one. Anything else counts as 0 here: its type is the engine's to refuse."""
    number = 0 if isinstance(value, bool) else whole_number(value) or 0
    return min(number, 2**63)


def _bad(message: str, param: str | None) -> Refusal:
    return Refusal(400, message, "BadRequestError", param)


# The inputs of a request for pooled outputs (embeddings, classes, scores), in the fields of the several APIs. Pure.
#
# Each becomes a sequence of its own in the engines.

_LISTS = {"input": str | list, "texts": str, "inputs": Mapping}
"""Fields with inputs that stand for themselves, and what each of many is. A list of numbers, or of messages, is one."""

_PAIRS = (
    ("query", "documents"),
    ("queries", "documents"),
    ("queries", "items"),
    ("text_1", "text_2"),
    ("data_1", "data_2"),
)
"""Fields with texts that are scored against each other. A model may embed each, so both sides count."""

_FIELDS = frozenset({*_LISTS, *(other for _, other in _PAIRS)})
"""Without any of them, a request has no inputs."""


def number_of_inputs(fields: Mapping[str, Any]) -> int:
    """Count the inputs, at least as many as the engines get. 0: the request has none in any of these fields."""
    if _FIELDS.isdisjoint(fields):
        return 0
    return max((sum(len(side) for side in sides) for _, sides in _found(fields)), default=0)


def characters_of_inputs(fields: Mapping[str, Any]) -> int:
    """Count the characters of the inputs, in whichever parts of them they are."""
    return sum(_characters(sides) for _, sides in _found(fields))


def field_of_inputs(fields: Mapping[str, Any]) -> str | None:
    """Name the field that has most inputs."""
    named = max(_found(fields), key=lambda found: sum(map(len, found[1])), default=None)
    return None if named is None else named[0]


def _found(fields: Mapping[str, Any]) -> Iterator[tuple[str, list[list[Any]]]]:
    """The fields in use, each with its inputs, those of both sides of a pair."""
    for name, kind in _LISTS.items():
        if (value := fields.get(name)) is not None:
            yield name, [value if isinstance(value, list) and value and isinstance(value[0], kind) else [value]]
    for one, other in _PAIRS:
        if fields.get(one) is not None and fields.get(other) is not None:
            yield other, [_side(fields[one]), _side(fields[other])]


def _side(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _characters(value: Any) -> int:
    # A list of its own, not recursion: how deeply a body nests is its client's choice.
    total, waiting = 0, [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            total += len(value)
        elif isinstance(value, list):
            # Token ids have no characters.
            waiting.extend(() if value and isinstance(value[0], int) else value)
        elif isinstance(value, Mapping):
            waiting.extend(value.values())
    return total


# The priority that an HTTP request asks for: by a header, a field of its body, or its key. Pure.
#
# The header goes before the field, as in vLLM, so that a proxy can set it without reading bodies.

HEADER = "X-Vllm-Priority"
"""vLLM's own name for the header, which clients and proxies of vLLM send."""

HEADER_KEY = HEADER.lower().encode()

FIELD = "priority"

_NUMBER = re.compile(rb"[ \t]*([+-]?[0-9]{1,18})[ \t]*")


@dataclass(frozen=True)
class PriorityTerms:
    """What a caller may ask for. `best`: the lowest number; None: any. `default`: for requests that name none.
    `whose`: begins the refusal of a better one."""

    best: int | None
    default: int
    whose: str


WITHOUT_KEY = PriorityTerms(0, 0, "requests without a key")
"""Whoever brings no key may only let others go first."""

UNLIMITED = PriorityTerms(None, 0, "")


def terms_of(key: KeyTerms) -> PriorityTerms:
    """Return what requests of this key may ask for."""
    default = key.default_priority or 0
    if key.best_priority is not None:
        default = max(default, key.best_priority)
    return PriorityTerms(key.best_priority, default, f"key {key.name}")


def priority_asked(fields: Mapping[str, Any], header: bytes, terms: PriorityTerms) -> int | Refusal:
    """Return the priority of a request; a refusal if it is no whole number, or better than allowed. `header`: empty if
    there is none."""
    asked, what, param = (fields.get(FIELD), FIELD, FIELD) if not header else (_number(header), HEADER, None)
    if asked is None and not header:
        return terms.default
    if (asked := whole_number(asked)) is None:
        return Refusal(400, f"{what} is no whole number", "BadRequestError", param)
    if abs(asked) > MOST_PRIORITY:
        why = f"{what} is {asked}; write a whole number from {-MOST_PRIORITY} to {MOST_PRIORITY}"
        return Refusal(400, why, "BadRequestError", param)
    if terms.best is not None and asked < terms.best:
        why = f"{terms.whose} may have priority {terms.best} at best (lower numbers are served first), got {asked}"
        return Refusal(403, why, "PermissionDeniedError", FIELD)
    return asked


def _number(text: bytes) -> int | None:
    found = _NUMBER.fullmatch(text)
    return None if found is None else int(found[1])
