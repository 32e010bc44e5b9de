from __future__ import annotations

from tests.unit.sdk.graphs.services import Frontend, Worker

Frontend.link(Worker)
