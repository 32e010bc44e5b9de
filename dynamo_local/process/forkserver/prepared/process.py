"""The life of a prepared process: it loads weights, and is forked for each worker that asks."""

from __future__ import annotations

import importlib
import os
import sys
from typing import NoReturn

from dynamo_local.core.process.restarts import USAGE_EXIT_CODE
from dynamo_local.process.ancestry import die_with_parent
from dynamo_local.process.forkserver import protocol
from dynamo_local.process.forkserver.child import set_process_title
from dynamo_local.process.forkserver.preload import Preloaded, settle_memory
from dynamo_local.process.forkserver.prepared.orders import PreparedOrder
from dynamo_local.process.forkserver.server import AcceptedOrder, ForkServer
from state.paths import StatePaths


def run_prepared(order: PreparedOrder, parent: int, preloaded: Preloaded, paths: StatePaths) -> AcceptedOrder:
    """Load the weights in this forked process, then fork for ever. Returns in processes that are forked from this one.

    `parent`: pid of the fork server, with which this process ends.
    """
    die_with_parent(parent)
    title = (sys.executable, "-m", __name__, order.key)
    set_process_title([os.fsencode(part) for part in title], dict(os.environb))
    importlib.import_module(order.module).prepare(order.recipe)
    settle_memory()
    reason = preloaded.unfit()
    if reason is not None:
        _give_up(reason)
    print(f"{os.getpid()} has loaded the weights (key {order.key})", flush=True)
    accepted = ForkServer(protocol.listen(str(paths.prepared_socket(order.key))), preloaded).run()
    assert isinstance(accepted, AcceptedOrder)
    return accepted


def _give_up(reason: str) -> NoReturn:
    print(f"warning: a process that has loaded weights cannot be forked: {reason}", flush=True)
    sys.stdout.flush()
    os._exit(USAGE_EXIT_CODE)
