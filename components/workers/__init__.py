"""Workers: services that run an engine on requests from the bus.

What belongs here talks to frontends, other workers and the prefill queue. The engines are in dynamo_local/engine, and
know nothing of the bus.
"""

from components.workers.worker import PrefillWorker, VllmWorker

__all__ = ["PrefillWorker", "VllmWorker"]
