from __future__ import annotations

from hypothesis import settings

# A deadline for each example is an assertion about time, and fails on a busy machine.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")
