"""Settings of all tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# No deadlines: a slow machine is not a wrong result.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")
