"""A graph of one service that is forked from a process that has imported something for it.

$DYN_TEST_FAILS makes it end when it starts: "configured" as one that is configured wrongly.
"""

from __future__ import annotations

import os

from dynamo_local.core.errors import ConfigError
from dynamo_local.sdk import Service, async_on_shutdown, async_on_start, service


@service(preload="tests.integration.process.slow_import")
class Forked(Service):
    """Tells what it finds, and that it ends."""

    @async_on_start
    async def look(self) -> None:
        from tests.integration.process import fake_weights, slow_import

        if os.environ.get("DYN_TEST_FAILS"):
            raise ConfigError("no such thing", "name another")
        found = {name: os.environ.get(name) for name in ("READ_LATER", "SET_AT_IMPORT", "DYN_TEST_MARK")}
        print(f"pid {os.getpid()} weights {fake_weights.loaded}", flush=True)
        print(f"pid {os.getpid()} importer {slow_import.IMPORTED_BY} {found}", flush=True)

    @async_on_shutdown
    async def tell(self) -> None:
        print("ends in order", flush=True)
