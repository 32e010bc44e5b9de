"""What requests have used: counted, written down, folded into totals by the hour, and reported. Pure."""

from __future__ import annotations

KEEP_DAYS = 400
"""Days for which totals are kept, if nothing else is set."""
