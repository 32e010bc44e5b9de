from __future__ import annotations

raise RuntimeError("two\nlines")
