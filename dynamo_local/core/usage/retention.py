"""How long usage is kept."""

from __future__ import annotations

KEEP_DAYS = 400
"""Days for which totals are kept, if nothing else is set."""
