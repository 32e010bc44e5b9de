"""The worker services: one program, an engine on the bus, in one of several roles.

    aggregated   takes requests from the router, prefills and decodes them
    decode       the same, in a graph that has prefill workers: long prompts come with their KV
    prefill      takes jobs from the prefill queue, and keeps their KV for decode workers to pull

A worker may change its role while it runs (roles.py): it keeps its engine, and finishes the requests that it has.
"""

from __future__ import annotations

import asyncio
import os

from components.workers.engine_service import EngineService
from components.workers.prefill_service import PrefillService
from components.workers.roles import ParkingOrders, Roles
from components.workers.settings import WorkerSettings, devices_of, make_engine, preload_of, worker_schema
from dynamo_local.core.fleet.view import PREFILL_ROLE
from dynamo_local.model.weights import check_model_files
from dynamo_local.process.context import ServiceContext
from dynamo_local.sdk import Service, async_on_shutdown, async_on_start, service

ENGINE_END_S = 5.0
"""How long the engine's processes may take to end before they are killed."""


@service(
    resources={"gpu": 1},
    devices=devices_of,
    config=worker_schema(),
    role="aggregated",
    role_beside={PREFILL_ROLE: "decode"},
    preload=preload_of,
)
class VllmWorker(Service):
    """Serves requests on one engine, vLLM unless configured otherwise."""

    def __init__(self, context: ServiceContext) -> None:
        self._context = context
        self._settings = context.settings(WorkerSettings)
        self._engine = make_engine(context)
        self._engine_service = EngineService(
            context,
            self._engine,
            stall_s=self._settings.stall_timeout_s,
            hot_prefix_share=self._settings.hot_prefix_share,
        )
        parking = self._engine_service.parking
        prefill = PrefillService(context, self._engine_service, self._settings.prefill_batch)
        self._roles = Roles(context, prefill, lambda: parking.resting)
        self._parking_orders = ParkingOrders(context, parking, self._engine_service.why_busy, self._roles, prefill)

    @async_on_start
    async def start(self) -> None:
        """Load the model. The process is ready, and routable, once this returns."""
        loop = asyncio.get_running_loop()
        announcer = self._context.announcer

        def progress(detail: str) -> None:
            loop.call_soon_threadsafe(lambda: announcer.update(detail=detail))

        await self._check_model_files()
        info = await self._engine.start(progress)
        # They may have been replaced while they were loaded.
        await self._check_model_files()
        announcer.update(engine=info)
        await self._engine_service.start()
        await self._roles.start()
        await self._parking_orders.start()

    async def _check_model_files(self) -> None:
        await asyncio.to_thread(check_model_files, self._context.config, os.environ)

    @async_on_shutdown
    async def stop(self) -> None:
        """Finish the requests under way, then end the engine's processes. Those of a failed engine are killed at once:
        they may no longer react."""
        self._parking_orders.stop()
        await self._roles.stop()
        await self._engine_service.drain(self._settings.drain_timeout_s)
        self._engine_service.stop()
        await self._engine.close(0.0 if self._engine_service.abandoned else ENGINE_END_S)


@service(resources={"gpu": 1}, devices=devices_of, config=worker_schema(), role=PREFILL_ROLE, preload=preload_of)
class PrefillWorker(VllmWorker):
    """Prefills long prompts for decode workers."""
