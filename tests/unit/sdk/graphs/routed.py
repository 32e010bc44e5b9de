from __future__ import annotations

from tests.unit.sdk.graphs.services import Frontend, Router, Worker

Frontend.link(Router).link(Worker)
