from __future__ import annotations


class Frontend:
    pass
