"""`AsyncLLM` with an engine-core client of ours.

`AsyncLLM` takes its client from `EngineCoreClient.make_async_mp_client`, a static method, and offers no way to pass
one in. The choices are to copy `AsyncLLM.__init__` into a subclass (and follow every change of it), to imitate an
engine process on the far end of vLLM's private ZMQ handshake, or to replace that one method while the one object is
made. This module does the last.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from vllm.v1.engine.core_client import EngineCoreClient


@contextmanager
def core_client(client: EngineCoreClient) -> Iterator[None]:
    """Give an AsyncLLM that is made within this client."""
    original = EngineCoreClient.make_async_mp_client
    EngineCoreClient.make_async_mp_client = staticmethod(lambda *_, **__: client)  # type: ignore[method-assign]
    try:
        yield
    finally:
        EngineCoreClient.make_async_mp_client = original  # type: ignore[method-assign]
