from __future__ import annotations

from tests.unit.sdk.graphs.services import Frontend

__all__ = ["Frontend"]
