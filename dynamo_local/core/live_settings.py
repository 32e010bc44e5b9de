"""Live settings: those settings of the frontend that may be changed while a server runs, and their allowed values.

Each is declared once, as a field of `LiveSettings`. The frontend's configuration keys, `dynamo config`, the values that
a frontend reads from the bus (bus/jetstream/live_settings.py) and the reference are made from these fields.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from dynamo_local.core.errors import UsageError

_WHOLE = re.compile(r"[0-9]+")


def _declare(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class LiveSettings:
    """The values of all live settings: whole numbers from 0, or switches, which `dynamo config` shows as 0 and 1.

    As a configuration, these are the values that hold until a setting is changed.
    """

    max_local_prefill_length: int = _declare(
        1000, "Maximum uncached tokens of a prompt that a decode worker prefills itself."
    )
    max_prefill_queue_size: int = _declare(
        2, "Number of waiting prefill jobs from which decode workers prefill all prompts themselves; 0: always."
    )
    rebalance: bool = _declare(
        True, "Whether requests migrate away from workers whose KV cache fills up (live setting: 1 or 0)."
    )
    rebalance_below: int = _declare(
        100, "Freeness (steps until the KV cache is full) below which requests migrate away from a worker."
    )
    rebalance_above: int = _declare(
        400, "Freeness (steps until the KV cache is full) above which a worker takes migrated requests."
    )
    rebalance_period_s: int = _declare(30, "Minimum time between two migrations of a request, in s.")

    def changed(self, values: Mapping[str, int]) -> LiveSettings:
        """A copy with some values replaced, by the names of the settings. Raises UsageError for an unknown name."""
        fields: dict[str, Any] = {setting(name).field: SETTINGS[name].convert(value) for name, value in values.items()}
        return dataclasses.replace(self, **fields)


@dataclass(frozen=True)
class LiveSetting:
    """A live setting for `dynamo config`: `name` in kebab-case, values as whole numbers (0 and 1 for a switch)."""

    name: str
    help: str
    default: int
    maximum: int
    minimum: int = 0
    is_switch: bool = False

    @property
    def field(self) -> str:
        """Name of the field of `LiveSettings`."""
        return self.name.replace("-", "_")

    def parse(self, text: str) -> int:
        """The value of a text. Raises UsageError for a value that is not allowed."""
        digits = text.strip()
        # More digits are too large a number in any case, and slow to convert.
        value = int(digits) if _WHOLE.fullmatch(digits) and len(digits) <= 20 else None
        if value is None or not self.minimum <= value <= self.maximum:
            shown = text if len(text) <= 40 else f"{text[:40]}..."
            raise UsageError(
                f"{shown!r} is not a value of {self.name}",
                f"expected a whole number from {self.minimum} to {self.maximum}",
            )
        return value

    def convert(self, value: int) -> int:
        """The value as the type of its field."""
        return bool(value) if self.is_switch else value


def _setting_of(known: dataclasses.Field[Any]) -> LiveSetting:
    default: Any = known.default
    is_switch = type(default) is bool
    return LiveSetting(
        name=known.name.replace("_", "-"),
        help=known.metadata["help"],
        default=int(default),
        maximum=1 if is_switch else 2**31 - 1,
        is_switch=is_switch,
    )


SETTINGS: Mapping[str, LiveSetting] = MappingProxyType(
    {known.name: known for known in map(_setting_of, dataclasses.fields(LiveSettings))}
)
"""The live settings by name."""


def setting(name: str) -> LiveSetting:
    """The setting of that name. Raises UsageError, which lists all names."""
    found = SETTINGS.get(name)
    if found is None:
        raise UsageError(f"there is no live setting {name!r}", f"there are {', '.join(sorted(SETTINGS))}")
    return found
