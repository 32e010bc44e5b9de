"""Whether requests would still be answered without some workers: the one rule behind every `--force`. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from dynamo_local.core.fleet.view import WORKER_ROLES


def last_answering(roles: Mapping[str, str], leaving: Collection[str]) -> tuple[str, ...]:
    """The watchers that answer requests now, sorted, if all of them are `leaving`; none if others remain.

    `roles`: the role of each watcher that counts. Each caller decides which do: those that run, those that are ready,
    those that are about to be added. Where nobody answers requests to begin with, nothing is lost.
    """
    answering = {watcher for watcher, role in roles.items() if role in WORKER_ROLES}
    return tuple(sorted(answering)) if answering.issubset(leaving) else ()
