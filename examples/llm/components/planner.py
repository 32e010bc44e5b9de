"""`dynamo planner` by the path that NVIDIA Dynamo's documentation gives.

PYTHONPATH=$PWD python components/planner.py --no-operation

This folder has no `__init__.py`: as a package it would hide the services in the package `components` from graphs that
are served from examples/llm.
"""

from __future__ import annotations

import sys

from dynamo_local.cli.main import run

if __name__ == "__main__":
    sys.exit(run(["planner", *sys.argv[1:]]))
