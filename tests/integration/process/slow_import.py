"""A preload of the test graph (forked_graph.py), which notes the process that imported it."""

from __future__ import annotations

import os

READ_LATER = ("READ_LATER",)

IMPORTED_BY = os.getpid()
os.environ["SET_AT_IMPORT"] = "yes"

if "DYN_TEST_BREAK_IMPORT" in os.environ:
    raise ImportError("nothing here")
