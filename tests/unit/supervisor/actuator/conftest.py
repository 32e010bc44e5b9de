"""A server whose processes are pretended."""

from __future__ import annotations

import pytest

from tests.unit.supervisor.actuator.fake_ports import FakePorts


@pytest.fixture
def fake() -> FakePorts:
    """A frontend and a worker run."""
    fake = FakePorts()
    fake.running("Frontend", "frontend")
    fake.running("VllmWorker", "decode", 0)
    return fake
