"""Bounds on what one request may make the server do, beside how many sequences it occupies (admission.py). Pure.

Names end up in logs and in every message about a request; texts are tokenized, grammars compiled, lists walked through
for each token, and addresses of media fetched, before anybody else has judged them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

NAME_CHARACTERS = 256
"""Longest id that a client may make up."""
SALT_CHARACTERS = 128
"""Longest salt: vLLM's own bound. It takes none with @, / or \\ either."""

_NAMES = {"cache_salt": SALT_CHARACTERS, "request_id": NAME_CHARACTERS, "session_id": NAME_CHARACTERS}
_PRINTABLE = re.compile(r"[ -~]*")
REQUEST_ID = b"x-request-id"
_ADAPTER = b"x-amzn-sagemaker-adapter-identifier"
"""Header by which vLLM's /invocations takes another model than the body names: one that the gate has not seen."""
JUDGED_HEADERS = (REQUEST_ID, _ADAPTER)

_WORDS = ("stop", "stop_sequences", "bad_words", "stop_token_ids")
_LISTS = frozenset({*_WORDS, "logprob_token_ids"})

_GRAMMARS = (("structured_outputs",), ("response_format",), ("text", "format"), ("output_config",), ("output_format",))
"""Paths of fields in which requests of the several APIs have grammars."""
_GRAMMAR_FIELDS = frozenset(path[0] for path in _GRAMMARS)

_MEDIA_TYPES = frozenset(
    {
        "image", "image_url", "image_pil", "image_embeds", "input_image", "computer_screenshot",
        "audio", "audio_url", "audio_embeds", "input_audio",
        "video", "video_url", "video_embeds",
        "file", "input_file", "document", "prompt_embeds",
    }
)  # fmt: skip
_MEDIA_KEYS = _MEDIA_TYPES & {
    "image_url", "image_pil", "image_embeds", "audio_url", "audio_embeds", "input_audio", "video_url", "video_embeds",
    "prompt_embeds",
}  # fmt: skip
"""Keys by which vLLM recognises a part without a type."""

_PROMPTS = frozenset(
    {
        "messages", "input", "system", "items",
        "inputs", "query", "queries", "text_1", "text_2", "data_1", "data_2",
    }
)  # fmt: skip
"""Fields in which the several APIs have texts, or messages with parts. (`documents` of a conversation are others.)"""

_CONTENTS = ("content", "output")
"""Fields in which messages, and the items of the Responses API, have their parts."""


@dataclass(frozen=True)
class RequestBounds:
    """Settings of frontend and workers."""

    max_tokenize_bytes: int = field(
        default=1024 * 1024,
        metadata={"help": "Maximum body of a request that only tokenizes or detokenizes, in bytes."},
    )
    max_grammar_bytes: int = field(
        default=64 * 1024,
        metadata={"help": "Maximum size of a request's grammar (JSON schema, regular expression, ...), in bytes."},
    )
    max_choices: int = field(default=1000, metadata={"help": "Maximum number of choices of a structured output."})
    max_regex_bytes: int = field(
        default=4096, metadata={"help": "Maximum size of the regular expression of a structured output, in bytes."}
    )
    grammar_timeout_s: float = field(
        default=10.0,
        metadata={"help": "Maximum time to check or compile a grammar, in s. After that its request fails."},
    )
    max_words: int = field(
        default=1000,
        metadata={
            "help": "Maximum number of entries of each of stop, stop_token_ids and bad_words. vLLM takes fewer of stop "
            "and bad_words (VLLM_MAX_STOP_STRINGS, VLLM_MAX_NUM_BAD_WORDS)."
        },
    )


@dataclass(frozen=True)
class Excess:
    """Excess of a request: the message for the client, and the field."""

    message: str
    param: str


def excess_of(fields: Mapping[str, Any], bounds: RequestBounds, max_candidates: int) -> Excess | None:
    """Find what a request's body asks too much of; None: nothing. `max_candidates` < 0: no bound.

    A body has few of the fields that have bounds, so that is looked at first.
    """
    excess = _long_name(fields) or _media(fields)
    if excess is None and not _GRAMMAR_FIELDS.isdisjoint(fields):
        excess = _grammar(fields, bounds)
    if excess is None and not _LISTS.isdisjoint(fields):
        excess = _lists(fields, bounds, max_candidates)
    return excess


def fields_of_text(body: bytes, bounds: RequestBounds) -> dict[str, Any] | Excess:
    """Return the fields of a request that generates nothing, or its excess. A body that is no JSON object has no
    fields, and is left to the server behind."""
    if len(body) > bounds.max_tokenize_bytes:
        return _beyond("the body", f"{bounds.max_tokenize_bytes} bytes", "max-tokenize-bytes", len(body), "prompt")
    fields = _read(body)
    if not isinstance(fields, dict):
        return {}
    return _long_name(fields) or _media(fields) or fields


def _read(body: bytes) -> Any:
    """Read a body as the server behind does, which takes more than JSON: NaN, UTF-16, lone surrogates."""
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        pass
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def excess_of_headers(headers: Iterable[tuple[bytes, bytes]]) -> Excess | None:
    """Check X-Request-Id, which is a request's id where it has no other, and that no header names a model."""
    for name, value in headers:
        if name.lower() == _ADAPTER:
            return Excess("X-Amzn-SageMaker-Adapter-Identifier is not taken: name the adapter as model", "model")
        if name.lower() == REQUEST_ID:
            excess = _no_name("X-Request-Id", value.decode("latin-1"), NAME_CHARACTERS)
            if excess is not None:
                return excess
    return None


def _long_name(fields: Mapping[str, Any]) -> Excess | None:
    for name, most in _NAMES.items():
        value = fields.get(name)
        if isinstance(value, str) and (excess := _no_name(name, value, most)) is not None:
            return excess
    return None


def _no_name(what: str, value: str, most: int) -> Excess | None:
    if len(value) <= most and _PRINTABLE.fullmatch(value):
        return None
    return Excess(f"{what} must be at most {most} printable ASCII characters", what)


def _media(fields: Mapping[str, Any]) -> Excess | None:
    """An address in it would be fetched before the model is found to take no images."""
    if fields.get("images"):
        return Excess("multimodal prompts are not supported: text only", "images")
    scored = fields.get("query") is not None or fields.get("queries") is not None
    for name, value in fields.items():
        if isinstance(value, str) or not (name in _PROMPTS or (scored and name == "documents")):
            continue
        for part in _parts(value):
            kind = part.get("type")
            if (isinstance(kind, str) and kind in _MEDIA_TYPES) or not _MEDIA_KEYS.isdisjoint(part):
                return Excess("multimodal prompts are not supported: text only", name)
    return None


def _parts(value: Any) -> Iterator[Mapping[str, Any]]:
    """The messages, their parts, and the parts of results of tools. Arguments of tools are text to us: not looked at.

    A list of its own, not recursion: how deeply a body nests is its client's choice.
    """
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting.extend(value)
        elif isinstance(value, dict):
            yield value
            for name in _CONTENTS:
                if isinstance(content := value.get(name), list | dict):
                    waiting.append(content)


def _grammar(fields: Mapping[str, Any], bounds: RequestBounds) -> Excess | None:
    return _constraints(fields.get("structured_outputs"), bounds) or next(
        (excess for path in _GRAMMARS if (excess := _size(fields, path, bounds)) is not None), None
    )


def _constraints(asked: Any, bounds: RequestBounds) -> Excess | None:
    if not isinstance(asked, Mapping):
        return None
    choices, regex = asked.get("choice"), asked.get("regex")
    if isinstance(choices, list) and len(choices) > bounds.max_choices:
        most = f"{bounds.max_choices} entries"
        return _beyond("structured_outputs.choice", most, "max-choices", len(choices), "structured_outputs")
    if isinstance(regex, str) and _bytes(regex) > bounds.max_regex_bytes:
        most = f"{bounds.max_regex_bytes} bytes"
        return _beyond("structured_outputs.regex", most, "max-regex-bytes", _bytes(regex), "structured_outputs")
    return None


def _size(fields: Mapping[str, Any], path: tuple[str, ...], bounds: RequestBounds) -> Excess | None:
    value: Any = fields
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    if not isinstance(value, Mapping):
        return None
    try:
        size = len(msgspec.json.encode(value))
    except RecursionError:
        return Excess(f"{'.'.join(path)} is nested too deeply", path[0])
    if size > bounds.max_grammar_bytes:
        return _beyond(".".join(path), f"{bounds.max_grammar_bytes} bytes", "max-grammar-bytes", size, path[0])
    return None


def _lists(fields: Mapping[str, Any], bounds: RequestBounds, max_candidates: int) -> Excess | None:
    for name in _WORDS:
        if (length := _length(fields.get(name))) > bounds.max_words:
            return _beyond(name, f"{bounds.max_words} entries", "max-words", length, name)
    length = _length(fields.get("logprob_token_ids"))
    if length > max_candidates >= 0:
        return _beyond("logprob_token_ids", f"{max_candidates} entries", "max-candidates", length, "logprob_token_ids")
    return None


def _length(value: Any) -> int:
    return len(value) if isinstance(value, list) else 0


def _bytes(text: str) -> int:
    return len(text.encode(errors="surrogatepass"))


def _beyond(what: str, most: str, setting: str, got: int, param: str) -> Excess:
    return Excess(f"{what} must have at most {most} (setting {setting}), got {got}", param)
