"""A server and a planner started as Dynamo's documentation has it, from examples/llm, on mockers."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.integration.server_process import READY_WITHIN_S, ServerProcess, eventually

pytestmark = pytest.mark.integration

EXAMPLES = Path(__file__).parents[3] / "examples" / "llm"
ENDED_WITHIN_S = 60.0

DYNAMO = {
    "Common": {
        "model": "quickstart",
        "block-size": 64,
        "max-model-len": 2048,
        "router": "kv",
        "kv-transfer-config": '{"kv_connector":"DynamoNixlConnector"}',
    },
    "Frontend": {"served_model_name": "some/model", "endpoint": "dynamo.Processor.chat/completions", "port": 0},
    "Processor": {"common-configs": ["model", "block-size", "max-model-len", "router"]},
    "Router": {"min-workers": 1, "common-configs": ["model", "router"]},
    "VllmWorker": {
        "remote-prefill": True,
        "conditional-disagg": True,
        "max-local-prefill-length": 10,
        "max-prefill-queue-size": 2,
        "ServiceArgs": {"workers": 1, "resources": {"gpu": 1}},
        "common-configs": ["model", "block-size", "max-model-len", "router", "kv-transfer-config"],
    },
    "PrefillWorker": {
        "max-num-batched-tokens": 2048,
        "ServiceArgs": {"workers": 1, "resources": {"gpu": 1}},
        "common-configs": ["model", "block-size", "max-model-len", "kv-transfer-config"],
    },
    "Planner": {"environment": "kubernetes"},
}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    config = tmp_path / "disagg_router.yaml"
    config.write_text(json.dumps(DYNAMO))
    serve = ["-m", "dynamo_local.cli.main", "serve", "graphs.disagg_router:Frontend", "-f", str(config)]
    mockers = ["--VllmWorker.engine", "mocker", "--PrefillWorker.engine", "mocker"]
    state = tmp_path / "state"
    with ServerProcess(state, "names", [*serve, *mockers, "--cpu-slots=2", "--namespace=names"], EXAMPLES) as process:
        yield process


def test_a_configuration_of_dynamo_serves_and_its_planner_watches(server: ServerProcess, tmp_path: Path) -> None:
    server.line("note: Common.router is ignored")
    line = server.line("API ready at", within_s=READY_WITHIN_S)
    url = next(word for word in line.split() if word.startswith("http://"))
    assert (
        answered(url, "one two three four five six seven eight nine ten eleven twelve")["usage"]["completion_tokens"]
        == 5
    )

    statefile = json.loads(server.paths.statefile.read_text())
    components = statefile["components"]
    assert statefile["circus_endpoint"]
    assert [components[f"names_{name}"]["resources"]["allocated_gpus"] for name in ("VllmWorker", "PrefillWorker")] == [
        [0],
        [1],
    ]
    watch(server, tmp_path / "log")

    server.signal(signal.SIGINT)
    assert server.end() == 0, server.output
    server.assert_nothing_left()


def answered(url: str, prompt: str) -> Any:
    body = {
        "model": "some/model",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 5,
        "ignore_eos": True,
    }
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=ENDED_WITHIN_S) as answer:
        return json.load(answer)


def watch(server: ServerProcess, log_dir: Path) -> None:
    """Run the planner's script until it has decided once."""
    script = [sys.executable, "components/planner.py", "--namespace", "names", "--no-operation", f"--log-dir={log_dir}"]
    options = ["--metric-pulling-interval=1", "--adjustment-interval=1", "--policy=dynamo", "--dynamo-tags"]
    decisions = log_dir / "decisions.jsonl"
    planner = subprocess.Popen([*script, *options], cwd=EXAMPLES, env=server.environ, stderr=subprocess.PIPE, text=True)
    try:
        eventually(lambda: _written(decisions) or planner.poll() is not None, "the planner decides nothing")
        planner.send_signal(signal.SIGINT)
        assert planner.wait(ENDED_WITHIN_S) == 0
    finally:
        planner.kill()
        _, said = planner.communicate()
    assert _written(decisions), said
    first = json.loads(decisions.read_text().splitlines()[0])
    assert (first["policy"], first["acts"], [role["role"] for role in first["roles"]]) == (
        "dynamo",
        False,
        ["decode", "prefill"],
    )
    (run,) = (path for path in log_dir.iterdir() if path.is_dir())
    events = EventAccumulator(str(run))
    events.Reload()
    dynamo = {tag for tag in events.Tags()["scalars"] if "/" not in tag}
    assert {"prefill_queue_size", "average_kv_load", "num_prefill_workers", "num_decode_workers", "num_gpu"} <= dynamo


def _written(path: Path) -> bool:
    """Whether the file has content: the planner makes it when it starts."""
    return path.exists() and path.stat().st_size > 0
