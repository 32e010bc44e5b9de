"""Policies of scaling: a module each, whose `propose` decides on one role (../proposals.py)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from dynamo_local.core.planning.policies import concurrency, dynamo, freeness, load
from dynamo_local.core.planning.proposals import Policy

POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        "load": load.propose,
        "freeness": freeness.propose,
        "concurrency": concurrency.propose,
        "dynamo": dynamo.propose,
    }
)
"""By their names in options and endpoints."""
