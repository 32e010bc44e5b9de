"""The values of an endpoint's fields: what each may be. Pure; `checks` names endpoint and field in the errors."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, get_args

import msgspec

from dynamo_local.core.endpoints.schedule import MOST_ENTRIES, MOST_ENTRY_CHARACTERS, parse_entry
from dynamo_local.core.endpoints.spec import Scaling
from dynamo_local.core.errors import ConfigError
from dynamo_local.core.names import check_endpoint
from dynamo_local.core.shares import LEAST_SHARE

MOST_WORKERS = 1024
MOST_DEVICES = 64
MOST_IDLE_S = 31_536_000
MOST_ARGS_BYTES = 65_536
MOST_LABELS = 64
MOST_LABEL_CHARACTERS = 256
MOST_MODEL_CHARACTERS = 4096
MOST_DEPTH = 16

_FIELDS_FOR_ARGS: Mapping[str, str] = MappingProxyType(
    {"model": "the field model", "engine": "the field engine", "workers": "the field min_workers"}
)
_SECRET_KEY = re.compile(
    r"(?:.*-)?(?:api-?keys?|(?:access|secret)-key|(?:hf|auth|access|api|bearer)-token|pass(?:word|wd|phrase)|secret"
    r"|credentials?)",
    re.IGNORECASE,
)
"""Not every token: a model's configuration has a pad-token."""
_PASSWORD_IN_URL = re.compile(r"://[^/@\s:]*:[^/@\s]+@")
_ARG = re.compile(r"[A-Za-z][A-Za-z0-9]*(?:-[A-Za-z0-9]+)*")


class RefusedValueError(Exception):
    """A value that is not allowed: the rest of the sentence that begins with its field, and what to do."""

    def __init__(self, cause: str, remedy: str, key: str | None = None) -> None:
        super().__init__(cause)
        self.cause, self.remedy, self.key = cause, remedy, key


def _name(value: Any) -> str:
    if not isinstance(value, str):
        raise RefusedValueError(f"is {shown(value)}", "write text")
    try:
        return check_endpoint(value)
    except ConfigError as error:
        raise RefusedValueError(f"is {shown(value)}", error.remedy or "") from error


def _model(value: Any) -> str:
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise RefusedValueError(f"is {shown(value)}", "write a folder, a Hugging Face id, or the name of a model")
    if value.startswith("."):
        raise RefusedValueError(f"is {shown(value)}", "write the whole path: endpoints are read in other folders, too")
    if len(value) > MOST_MODEL_CHARACTERS:
        raise RefusedValueError(f"has {len(value)} characters", f"write at most {MOST_MODEL_CHARACTERS}")
    return value


def _choice(*choices: str) -> Callable[[Any], str]:
    def check(value: Any) -> str:
        if value not in choices:
            raise RefusedValueError(f"is {shown(value)}", f"write one of {', '.join(choices)}")
        return str(value)

    return check


def _workers(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_WORKERS:
        raise RefusedValueError(f"is {shown(value)}", f"write a whole number from 1 to {MOST_WORKERS}")
    return value


def _least_workers(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST_WORKERS:
        raise RefusedValueError(f"is {shown(value)}", f"write a whole number from 0 to {MOST_WORKERS}")
    return value


def _idle_time(value: Any) -> float:
    number = _number(value)
    if number is None or not 0 < number <= MOST_IDLE_S:
        remedy = f"write a time in seconds above 0, of at most {MOST_IDLE_S} (a year)"
        raise RefusedValueError(f"is {shown(value)}", remedy)
    return number


def _awake(value: Any) -> tuple[str, ...]:
    is_list = isinstance(value, list | tuple) and all(isinstance(one, str) for one in value)
    if not is_list or len(value) > MOST_ENTRIES:
        raise RefusedValueError(
            f"is {shown(value)}", f'write a list of at most {MOST_ENTRIES} texts, such as ["mon-fri 08:00-18:30"]'
        )
    for number, entry in enumerate(value):
        key = str(number)
        if len(entry) > MOST_ENTRY_CHARACTERS:
            raise RefusedValueError(f"is {shown(entry)}", f"write at most {MOST_ENTRY_CHARACTERS} characters", key)
        try:
            parse_entry(entry)
        except ConfigError as error:
            raise RefusedValueError(f"is wrong: {error.cause}", error.remedy or "", key) from error
    return tuple(value)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise RefusedValueError(f"is {shown(value)}", "write true or false")
    return value


def _gpu(value: Any) -> float:
    number = _number(value)
    if number is None or not LEAST_SHARE <= number <= MOST_DEVICES or (number > 1 and not number.is_integer()):
        raise RefusedValueError(
            f"is {shown(value)}",
            f"write a number of devices from 1 to {MOST_DEVICES}, or a share of one from {LEAST_SHARE}, such as 0.5",
        )
    return number


def _requests_per_worker(value: Any) -> float:
    number = _number(value)
    if number is None or not 0 < number <= 1_000_000:
        raise RefusedValueError(f"is {shown(value)}", "write a number above 0, of at most a million")
    return number


def _number(value: Any) -> float | None:
    """The value as a finite float; None if it is no number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _labels(value: Any) -> dict[str, str]:
    if not isinstance(value, Mapping) or len(value) > MOST_LABELS:
        raise RefusedValueError(f"is {shown(value)}", f"write at most {MOST_LABELS} labels, as {{team: search}}")
    for key, text in value.items():
        for part in (key, text):
            if not isinstance(part, str) or not part.isprintable() or len(part) > MOST_LABEL_CHARACTERS:
                remedy = f"write text of at most {MOST_LABEL_CHARACTERS} printable characters"
                raise RefusedValueError(f"has {shown(part)}", remedy)
        if not key:
            raise RefusedValueError("has an empty key", "name the label")
    return dict(value)


def _args(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise RefusedValueError(f"is {shown(value)}", "write settings as a mapping: {max-model-len: 4096}")
    args: dict[str, Any] = {}
    for key, item in value.items():
        name = arg_name(key)
        if not isinstance(key, str) or not _ARG.fullmatch(name):
            raise RefusedValueError(f"has the key {shown(key)}", "write the name of a setting, such as max-model-len")
        if name in args:
            raise RefusedValueError("is given twice", "write it once: - and _ mean the same", name)
        if name in _FIELDS_FOR_ARGS:
            raise RefusedValueError("is no argument", f"use {_FIELDS_FOR_ARGS[name]}", name)
        _check_value(name, name, item, MOST_DEPTH)
        args[name] = item
    size = len(encoded(args))
    if size > MOST_ARGS_BYTES:
        raise RefusedValueError(f"takes {size} bytes", f"write at most {MOST_ARGS_BYTES}")
    return {name: item for name, item in args.items() if item is not None}


def arg_name(key: Any) -> str:
    """The name of an argument as it is kept: in kebab-case, without the hyphens of an option."""
    return str(key).removeprefix("--").replace("_", "-")


def is_arg(key: str) -> bool:
    """Whether the key could be an argument, such as max-model-len or max_model_len."""
    return _ARG.fullmatch(arg_name(key)) is not None


def _check_value(arg: str, name: str, value: Any, depth: int) -> None:
    """Raise RefusedValueError for what JSON cannot express, and for secrets: the registry and others' eyes are no place
    for them."""
    if depth == 0:
        raise RefusedValueError("is nested too deeply", f"use at most {MOST_DEPTH} levels", arg)
    if isinstance(value, str):
        _check_text(arg, name, value)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise RefusedValueError(f"has the key {shown(key)}", "write text", arg)
            _check_value(arg, arg_name(key), item, depth - 1)
    elif isinstance(value, list | tuple):
        for item in value:
            _check_value(arg, name, item, depth - 1)
    elif not (value is None or isinstance(value, bool) or _is_plain_number(value)):
        raise RefusedValueError(
            "has a value that JSON cannot express", "use numbers of 64 bits, text, true, false, lists and mappings", arg
        )


def _check_text(arg: str, name: str, value: str) -> None:
    if _SECRET_KEY.fullmatch(name) or _PASSWORD_IN_URL.search(value):
        raise RefusedValueError(
            "looks like a secret, which is not kept with an endpoint",
            "set it in the environment of `dynamo serve`, or in a file",
            arg,
        )
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RefusedValueError("is not text", "use UTF-8", arg) from error


def _is_plain_number(value: Any) -> bool:
    if isinstance(value, int):
        return -(2**63) <= value < 2**63
    return isinstance(value, float) and math.isfinite(value)


def encoded(value: Any) -> bytes:
    """A field's value as bytes that are equal for equal values of equal types: 1, 1.0 and true differ."""
    return msgspec.json.encode(value, order="deterministic")


def shown(value: Any) -> str:
    """The value in an error, shortened; a mapping or list, in which secrets may be, only by its kind."""
    if isinstance(value, Mapping | list | tuple):
        return "a mapping" if isinstance(value, Mapping) else "a list"
    text = repr(value) if not isinstance(value, int) or value.bit_length() < 256 else "a huge number"
    return text if len(text) <= 60 else f"{text[:57]}..."


CHECKS: Mapping[str, Callable[[Any], Any]] = MappingProxyType(
    {
        "name": _name,
        "model": _model,
        "adapter_of": _name,
        "engine": _choice("vllm", "mocker"),
        "args": _args,
        "gpu": _gpu,
        "min_workers": _least_workers,
        "max_workers": _workers,
        "disaggregated": _flag,
        "min_prefill_workers": _workers,
        "max_prefill_workers": _workers,
        "park_after_s": _idle_time,
        "sleep_after_s": _idle_time,
        "awake": _awake,
        "forecast": _flag,
        "requests_per_worker": _requests_per_worker,
        "policy": _choice(*get_args(Scaling)),
        "labels": _labels,
    }
)
"""By field: returns the value as it is kept, or raises RefusedValueError. Never asked about None, a default."""
