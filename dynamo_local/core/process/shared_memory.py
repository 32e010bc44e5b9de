"""Shared memory that engines need. Pure."""

from __future__ import annotations

ENGINE_SHARED_BYTES = 240 * 1024 * 1024
"""Room in /dev/shm without which vLLM does not start an engine on a CPU, or one with several ranks: that of its largest
message queue, 10 chunks of 24 MiB. Its queues fill little of it, so engines can have the same room."""
