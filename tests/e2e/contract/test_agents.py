"""Two agents read KV for vLLM's connector: NIXL's, on GPUs, and ours, where engines compute in ordinary memory. Both do
what the connector and the reading thread take for granted."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import msgspec
import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.config import CacheConfig
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.distributed.nixl_utils import NixlWrapper

from dynamo_local.engine.vllm.kv import agents, identity
from dynamo_local.engine.vllm.kv.agents import MemoryAgent, NetworkAgent, ReaderThread, bind_transport
from dynamo_local.engine.vllm.kv.pull.host import open_pull
from dynamo_local.engine.vllm.kv.pull.messages import Description
from dynamo_local.engine.vllm.kv.pull.worker import own_agent
from dynamo_local.engine.vllm.kv.stream.agent import StreamAgent
from dynamo_local.engine.vllm.launch import _set_up_transfer
from dynamo_local.engine.vllm.patches.kv import replaced_agents
from tests.e2e.kv.agent_source import COUNT, PIECE, SAID, agent_of, pieces

PATIENCE_S = 60.0


@pytest.fixture
def source(request: pytest.FixtureRequest) -> Iterator[tuple[subprocess.Popen[str], bytes, int]]:
    """Start a source. Returns its process, metadata, and the address of its memory, each piece full of its number."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.e2e.kv.agent_source", request.param],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        said = next(line for line in process.stdout if re.fullmatch(SAID, line))
        metadata, address = said.split()
        yield process, bytes.fromhex(metadata), int(address)
        process.kill()


def outcome(reader: ReaderThread, local: Any, remote: Any, indices: list[int]) -> str:
    """DONE, or what was raised."""
    numbers = np.array(indices)
    read = reader.make_prepped_xfer("READ", local, numbers, remote, numbers, notif_msg=b"for nobody")
    reader.transfer(read)
    try:
        for _ in range(1000):
            if (state := reader.check_xfer_state(read)) != "PROC":
                return state
            reader.wait(PATIENCE_S / 1000)
    except Exception as error:  # noqa: BLE001  # of either agent
        return type(error).__name__
    return "nothing"


@pytest.mark.parametrize(
    ("kind", "source", "dead"),
    [
        ("nixl", "nixl", "nixlRemoteDisconnectError"),
        ("memory", "memory", "EngineError"),
        # Of this machine, as it is here. Others: tests/e2e/kv/test_between_machines.py.
        ("network", "network", "EngineError"),
        ("stream", "stream", "EngineError"),
    ],
    indirect=["source"],
)  # fmt: skip
def test_an_agent_reads_and_notices_that_the_source_dies(
    kind: str, source: tuple[subprocess.Popen[str], bytes, int], dead: str
) -> None:
    process, metadata, address = source
    agent = agent_of(kind, "reader")
    memory = np.full((COUNT, PIECE), 255, dtype=np.uint8)
    ranges = agent.get_reg_descs([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
    agent.register_memory(ranges, backends=["UCX"])
    name = agent.add_remote_agent(metadata)
    local = agent.prep_xfer_dlist("NIXL_INIT_AGENT", agent.get_xfer_descs(pieces(memory.ctypes.data), "DRAM"))
    remote = agent.prep_xfer_dlist(name, agent.get_xfer_descs(pieces(address), "DRAM"))
    reader = ReaderThread(agent, lambda: None)
    wanted = [3, 4, 5, 60]
    assert outcome(reader, local, remote, wanted) == "DONE"
    assert [row[0] for row in memory if (row == row[0]).all() and row[0] != 255] == wanted
    process.kill()
    process.wait()
    assert outcome(reader, local, remote, [7]) == dead
    assert (memory[7] == 255).all()
    reader.close()
    for handle in (local, remote):
        agent.release_dlist_handle(handle)
    agent.remove_remote_agent(name)
    agent.deregister_memory(ranges)


def test_all_that_vllm_does_with_an_agent_can_be_done_with_ours() -> None:
    source = inspect.getsource(NixlBaseConnectorWorker) + inspect.getsource(NixlPullConnectorWorker)
    used = set(re.findall(r"self\.nixl_wrapper\.(\w+)", source))
    # Of notifications there are none (PullWorker), and the reading thread answers for itself.
    for ours in (MemoryAgent, NetworkAgent, StreamAgent):
        assert used - {*dir(ours), *dir(ReaderThread)} == {"send_notif", "get_new_notifs"}
    assert "nixl_wrapper_cls = NixlWrapper\n" in source


def test_agents_are_replaced_for_a_while_only() -> None:
    worker: Any = importlib.import_module(NixlBaseConnectorWorker.__module__)
    for device, kind in (("", MemoryAgent), ("eth1", NetworkAgent)):
        with replaced_agents(own_agent(device, "", lambda: None)):
            assert worker.NixlWrapper is kind
    with replaced_agents(own_agent("", "127.0.0.1", lambda: None)):
        assert isinstance(worker.NixlWrapper("reader", None), NetworkAgent)
    assert worker.NixlWrapper is NixlWrapper
    assert importlib.import_module("nixl._api").nixl_agent is NixlWrapper


async def test_an_engine_whose_memory_cannot_be_read_lends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    description = Description("e", (), {}, block_size=32, block_bytes=1)
    manager = SimpleNamespace(processes=[SimpleNamespace(pid=7)])
    core = SimpleNamespace(
        resources=SimpleNamespace(engine_manager=manager),
        call_utility_async=AsyncMock(return_value=msgspec.to_builtins(description)),
    )
    monkeypatch.setattr(identity, "fingerprints", lambda *_: {None: "print"})
    config = SimpleNamespace(cache_config=CacheConfig(block_size=32), lora_config=None)
    adapters = SimpleNamespace(requests=[], request=lambda _: None)
    for why in (None, "not allowed"):
        monkeypatch.setattr(agents, "why_unreadable", {7: why}.get)
        pull = await open_pull(core, config, adapters, {})
        assert pull.unsupported == why
        assert (pull.prefix(range(100), None, None) is None) is (why is not None)


def test_an_engine_that_may_not_open_a_port_starts_without() -> None:
    made: list[Any] = []

    def configuration(transfer: Any = None) -> Any:
        made.append(transfer)
        return SimpleNamespace(kv_transfer_config=None)

    assert _set_up_transfer(configuration, wanted=True, forbidden="there are others")[1:] == (None, "there are others")
    assert made == [None]


def test_the_transport_is_bound_to_one_interface() -> None:
    bound = {"UCX_NET_DEVICES": "lo"}
    bind_transport("eth1", only_tcp=True, environ=bound)
    tcp = {"UCX_TLS": "tcp", "UCX_TCP_BRIDGE_ENABLE": "y", "UCX_TCP_SYN_CNT": "1", "UCX_TCP_USER_TIMEOUT": "10s"}
    assert bound == {"UCX_NET_DEVICES": "eth1", **tcp}
    chosen = {"UCX_NET_DEVICES": "mlx5_0:1"}
    bind_transport("eth1", only_tcp=False, environ=chosen)
    assert chosen == {"UCX_NET_DEVICES": "mlx5_0:1"}
