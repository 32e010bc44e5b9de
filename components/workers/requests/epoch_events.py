"""What becomes of single epochs, for whoever has to see to something afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

from dynamo_local.core.messages.work import RequestEpoch


@dataclass
class EpochListener:
    """What becomes of one epoch."""

    computed: asyncio.Event = field(default_factory=asyncio.Event)
    """It has finished, one way or another."""
    forgotten: asyncio.Event = field(default_factory=asyncio.Event)
    """Its frontend is done with it, or gone; nothing of it is left here."""


class EpochEvents:
    """Those that are wanted. Of all other epochs, nothing is noted."""

    def __init__(self) -> None:
        self._watches: dict[RequestEpoch, EpochListener] = {}

    def add(self, request: RequestEpoch) -> EpochListener:
        """Watch an epoch from now on, until it is forgotten."""
        watch = self._watches[request] = EpochListener()
        return watch

    def computed(self, request: RequestEpoch) -> None:
        """It has finished."""
        if (watch := self._watches.get(request)) is not None:
            watch.computed.set()

    def forgotten(self, requests: Iterable[RequestEpoch]) -> None:
        """Nothing of these is left."""
        for request in requests:
            if (watch := self._watches.pop(request, None)) is not None:
                watch.computed.set()
                watch.forgotten.set()
