"""A process whose agent reads all memory of a source, once for each line on its standard input. Without vLLM, to start
at once."""

from __future__ import annotations

import sys

import numpy as np

from dynamo_local.engine.vllm.kv.agents import ReaderThread
from tests.e2e.kv.agent_source import COUNT, agent_of, pieces

_LOOK_S = 0.01


def read(kind: str, metadata: str, address: str, size: str, device: str, host: str) -> None:
    """Say "connected", and of each read "DONE", or "ended" and the name of the error."""
    agent = agent_of(kind, "reader", device, host)
    memory = np.zeros(COUNT * int(size), dtype=np.uint8)
    agent.register_memory(agent.get_reg_descs([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM"))
    name = agent.add_remote_agent(bytes.fromhex(metadata))
    here, there = (pieces(int(start), int(size)) for start in (memory.ctypes.data, address))
    local = agent.prep_xfer_dlist("NIXL_INIT_AGENT", agent.get_xfer_descs(here, "DRAM"))
    remote = agent.prep_xfer_dlist(name, agent.get_xfer_descs(there, "DRAM"))
    thread, numbers = ReaderThread(agent, lambda: None), np.arange(COUNT)
    print("connected", flush=True)
    for _ in sys.stdin:
        asked = thread.make_prepped_xfer("READ", local, numbers, remote, numbers)
        thread.transfer(asked)
        try:
            while (state := thread.check_xfer_state(asked)) == "PROC":
                thread.wait(_LOOK_S)
        except Exception as error:  # noqa: BLE001  # of either agent
            state = f"ended {type(error).__name__}"
        print(state, flush=True)


if __name__ == "__main__":
    read(*sys.argv[1:])
