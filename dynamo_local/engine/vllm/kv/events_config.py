"""What is refused of vLLM's `kv-events-config`, which a user may set for a subscriber of their own."""

from __future__ import annotations

from typing import Any

from dynamo_local.core.errors import EngineError

_ANY_ADDRESS = ("tcp://*", "tcp://0.0.0.0", "tcp://[::]", "tcp://:::")
"""How vLLM's publisher is told to listen on all addresses of the machine; its default endpoint is one of these."""


def check_events_config(config: Any) -> None:
    """Raise EngineError if vLLM would publish to everybody who reaches the machine. `config` is a vLLM KVEventsConfig,
    or None.

    vLLM's publisher has no authentication, and its events tell the tokens of all prompts.
    """
    if config is None or not config.enable_kv_cache_events or config.publisher != "zmq":
        return
    for name, endpoint in (("endpoint", config.endpoint), ("replay_endpoint", config.replay_endpoint)):
        if endpoint is not None and endpoint.startswith(_ANY_ADDRESS):
            raise EngineError(
                f"kv-events-config would publish all prompts to whoever reaches this machine ({name} {endpoint})",
                "name a socket in a private folder instead: endpoint ipc:///PATH",
            )
