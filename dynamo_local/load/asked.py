"""Turns the options of `dynamo load` into settings, and reads the files that they name."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from dynamo_local.core.errors import UsageError
from dynamo_local.load.client import parse_url
from dynamo_local.load.figures import parse_objective
from dynamo_local.load.quantities import parse_duration, shown_duration
from dynamo_local.load.session import Load, LoadLimits, Settings
from dynamo_local.load.workload import (
    Cut,
    Lengthwise,
    Planned,
    Sharing,
    drawn,
    endless,
    parse_arrivals,
    parse_lengths,
    parse_trace,
)

KEY_ENV = "OPENAI_API_KEY"
"""Environment variable with the API key of `dynamo load`; --api-key-file takes precedence."""
DEFAULT_DURATION = "60s"
DEFAULT_INPUT, DEFAULT_OUTPUT = "512", "128"
_NOT_KEPT = ("api_key_file",)
_OF_A_TRACE = ("speed", "max_input", "max_output")
_OF_LENGTHS = ("input", "output", "prefix_share", "prefix_groups")


@dataclass(frozen=True)
class Asked:
    """The options of `dynamo load`. None: not given."""

    url: str
    model: str | None = None
    rate: str | None = None
    trace: Path | None = None
    concurrency: int | None = None
    speed: float | None = None
    duration: str | None = None
    requests: int | None = None
    warmup: str | None = None
    input: str | None = None
    output: str | None = None
    max_input: int | None = None
    max_output: int | None = None
    prefix_share: float | None = None
    prefix_groups: int | None = None
    chat: bool = False
    text: bool = False
    vocab: str | None = None
    ignore_eos: bool = True
    body: str | None = None
    max_in_flight: int = 512
    timeout: str = "600s"
    slo: str | None = None
    api_key_file: Path | None = None
    seed: int = 0

    def settings(self, environ: Mapping[str, str]) -> Settings:
        """Return the settings of the run. Raises UsageError."""
        load, told = self._load()
        warmup_s = 0.0 if self.warmup is None else parse_duration(self.warmup)
        if load.duration_s is not None and warmup_s >= load.duration_s:
            raise UsageError("nothing is left after the warm-up", "lengthen --duration or shorten --warmup")
        return Settings(
            endpoint=parse_url(self.url, read_key(self.api_key_file, environ)),
            model=self.model,
            load=load,
            limits=LoadLimits(max(self.max_in_flight, load.streams or 0), parse_duration(self.timeout)),
            seed=self.seed,
            is_chat=self.chat,
            is_text=self.text,
            vocabulary=None if self.vocab is None else _vocabulary(self.vocab),
            ignore_eos=self.ignore_eos,
            extra={} if self.body is None else _fields(self.body),
            warmup_s=warmup_s,
            objective=None if self.slo is None else parse_objective(self.slo),
            told={**self._kept(), "load": told},
        )

    def _kept(self) -> dict[str, Any]:
        """Return the options to be saved with the run."""
        kept = {name: value for name, value in asdict(self).items() if value is not None and name not in _NOT_KEPT}
        if self.trace is not None:
            return {**kept, "trace": self.trace.name}
        return {"input": DEFAULT_INPUT, "output": DEFAULT_OUTPUT, **kept}

    def _load(self) -> tuple[Load, str]:
        """Return the load, and its description in words."""
        given = [name for name in ("rate", "trace", "concurrency") if getattr(self, name) is not None]
        if len(given) != 1:
            raise UsageError(
                f"--{given[0]} and --{given[1]} exclude each other" if given else "no load named",
                "write --rate 5, --trace FILE or --concurrency 8",
            )
        if self.trace is not None:
            self._refuse(_OF_LENGTHS, "its requests have lengths of their own; --max-input and --max-output cap them")
            return self._traced(self.trace)
        self._refuse(_OF_A_TRACE, "they belong to --trace")
        shape = self._shape()
        duration_s = self._duration_s(DEFAULT_DURATION)
        words = f"{shape.input} tokens in, {shape.output} out, seed {self.seed}"
        for_time = f" for {shown_duration(duration_s)}" if duration_s is not None else ""
        if self.concurrency is not None:
            requests = endless(shape, self.seed)
            load = Load(self._first(requests), duration_s, shape.longest, self.concurrency)
            return load, f"{self.concurrency} streams{for_time}, {words}"
        arrivals = parse_arrivals(self.rate or "")
        requests = drawn(arrivals, shape, float("inf") if duration_s is None else duration_s, self.seed)
        return Load(self._first(requests), duration_s, shape.longest), f"{arrivals}{for_time}, {words}"

    def _traced(self, path: Path) -> tuple[Load, str]:
        speed = 1.0 if self.speed is None else self.speed
        cut = Cut(speed, self._duration_s(None), self.max_input, self.max_output)
        try:
            with path.open(encoding="utf-8", errors="replace") as lines:
                trace = parse_trace(lines)
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror}") from error
        requests = list(self._first(cut.apply(trace)))
        longest = max(each.input_tokens + each.output_tokens for each in requests)
        words = f"{len(requests)} requests of {path.name} at {speed:g} times its speed, seed {self.seed}"
        # A trace shorter than the duration ends the load with its last request.
        duration_s = cut.duration_s if len(requests) < len(trace) and self.requests is None else None
        return Load(requests, duration_s, longest), words

    def _shape(self) -> Lengthwise:
        sharing = Sharing(self.prefix_share or 0.0, self.prefix_groups or 1)
        if self.prefix_groups is not None and self.prefix_share is None:
            raise UsageError("--prefix-groups goes with --prefix-share only", "add --prefix-share 0.5")
        return Lengthwise(
            parse_lengths(self.input or DEFAULT_INPUT, "--input"),
            parse_lengths(self.output or DEFAULT_OUTPUT, "--output"),
            sharing,
        )

    def _duration_s(self, default: str | None) -> float | None:
        """Return the duration in seconds, or None if the number of requests ends the load."""
        text = self.duration or (None if self.requests else default)
        return None if text is None else parse_duration(text)

    def _first(self, requests: Iterable[Planned]) -> Iterable[Planned]:
        return itertools.islice(requests, self.requests)

    def _refuse(self, names: Iterable[str], why: str) -> None:
        for name in names:
            if getattr(self, name) is not None:
                raise UsageError(f"--{name.replace('_', '-')} does not go with this kind of load", why)


def read_key(path: Path | None, environ: Mapping[str, str]) -> str | None:
    """Read the API key from the file or the environment. Raises UsageError.

    There is no option for the key itself, since all users of a machine can read command lines.
    """
    if path is None:
        return environ.get(KEY_ENV, "").strip() or None
    try:
        lines = path.read_text().split()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the API key in {path}: {error}") from error
    if not lines:
        raise UsageError(f"{path} holds no API key")
    return lines[0]


def _vocabulary(text: str) -> range:
    low, _, high = text.partition("-")
    if not (low.isascii() and low.isdigit() and high.isascii() and high.isdigit() and int(low) <= int(high) < 2**31):
        raise UsageError(f"--vocab: {text!r} is not a range of token ids", "write for example 100-31999")
    return range(int(low), int(high) + 1)


def _fields(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise UsageError(f"--body: {error}", """write for example '{"temperature": 1}'""") from error
