"""Settings that change while a server runs: what there is, and which values are allowed.

The one registry: commands refuse by it before they write, readers refuse by it what others wrote.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from dynamo_local.core.errors import UsageError

_WHOLE = re.compile(r"[0-9]+")


@dataclass(frozen=True)
class LiveSetting:
    """A setting whose value is a whole number. `default` holds where the graph's configuration says nothing."""

    name: str
    help: str
    default: int
    minimum: int = 0
    maximum: int = 2**31 - 1

    def parse(self, text: str) -> int:
        """The value that a text stands for. Raises UsageError for what is not allowed."""
        digits = text.strip()
        # Longer ones are too large in any case, and slow to convert.
        value = int(digits) if _WHOLE.fullmatch(digits) and len(digits) <= 20 else None
        if value is None or not self.minimum <= value <= self.maximum:
            shown = text if len(text) <= 40 else f"{text[:40]}..."
            raise UsageError(
                f"{shown!r} is not a value of {self.name}",
                f"expected a whole number from {self.minimum} to {self.maximum}",
            )
        return value


MAX_LOCAL_PREFILL_LENGTH = LiveSetting(
    "max-local-prefill-length",
    "Maximum uncached tokens of a prompt that a decode worker prefills itself.",
    default=1000,
)
MAX_PREFILL_QUEUE_SIZE = LiveSetting(
    "max-prefill-queue-size",
    "Number of waiting prefill jobs from which decode workers prefill all prompts themselves; 0: always.",
    default=2,
)
REBALANCE = LiveSetting(
    "rebalance",
    "Whether requests migrate away from workers whose KV cache fills up (live setting: 1 or 0).",
    default=0,
    maximum=1,
)
REBALANCE_BELOW = LiveSetting(
    "rebalance-below",
    "Freeness (steps until the KV cache is full) below which requests migrate away from a worker.",
    default=100,
)
REBALANCE_ABOVE = LiveSetting(
    "rebalance-above",
    "Freeness (steps until the KV cache is full) above which a worker takes migrated requests.",
    default=400,
)
REBALANCE_PERIOD_S = LiveSetting(
    "rebalance-period-s",
    "Minimum time between two migrations of a request, in s.",
    default=30,
)

SETTINGS: Mapping[str, LiveSetting] = MappingProxyType(
    {
        setting.name: setting
        for setting in (
            MAX_LOCAL_PREFILL_LENGTH,
            MAX_PREFILL_QUEUE_SIZE,
            REBALANCE,
            REBALANCE_BELOW,
            REBALANCE_ABOVE,
            REBALANCE_PERIOD_S,
        )
    }
)


def setting(name: str) -> LiveSetting:
    """The setting of that name. Raises UsageError, naming those there are."""
    found = SETTINGS.get(name)
    if found is None:
        raise UsageError(f"there is no live setting {name!r}", f"there are {', '.join(sorted(SETTINGS))}")
    return found
