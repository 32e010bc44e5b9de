"""Command lines as NVIDIA Dynamo's documentation has them: `dynamo serve`, and the planner's script."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dynamo_local.cli.main import run
from dynamo_local.cli.serve import REMEDIES, join_values, port_in
from dynamo_local.core.errors import ConfigError

REPOSITORY = Path(__file__).parents[3]
EXAMPLES = REPOSITORY / "examples" / "llm"
MOCKERS = ("--cpu-slots=4", "--VllmWorker.engine=mocker", "--dry-run")


def python(*arguments: str, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), **environ}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize("graph", ["agg", "agg_router", "disagg", "disagg_router"])
def test_the_example_graphs_are_served_from_their_folder(graph: str, tmp_path: Path) -> None:
    serve = ("-m", "dynamo_local.cli.main", "serve", f"graphs.{graph}:Frontend", "-f", f"./configs/{graph}.yaml")
    done = python(*serve, *MOCKERS, cwd=EXAMPLES, DYN_LOCAL_STATE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    watchers = set(re.findall(r"^dynamo_(\w+?)(?:_1)? ", done.stdout, re.MULTILINE))
    router, prefill = graph != "agg", graph.startswith("disagg")
    assert watchers == {"VllmWorker", "Planner", "Frontend", *["Router"] * router, *["PrefillWorker"] * prefill}


def test_a_graph_is_served_from_anywhere_by_its_full_name(tmp_path: Path) -> None:
    serve = ("-m", "dynamo_local.cli.main", "serve", "examples.llm.graphs.disagg_router:Frontend")
    done = python(*serve, *MOCKERS, cwd=tmp_path, DYN_LOCAL_STATE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("given", "joined"),
    [
        (["g:F", "--Planner.log-dir", "log/planner"], ["g:F", "--Planner.log-dir=log/planner"]),
        (["g:F", "--A.b", "1", "--A.c", "--A.d=2", "--A.e", "x"], ["g:F", "--A.b=1", "--A.c", "--A.d=2", "--A.e=x"]),
        (["--VllmWorker.enforce-eager", "g:F"], ["--VllmWorker.enforce-eager", "g:F"]),
        (["g:F", "more"], ["g:F", "more"]),
        (["g:F", "--A.b=1", "more"], ["g:F", "--A.b=1", "more"]),
        (["g:F", "--A.b", "1", "more"], ["g:F", "--A.b=1", "more"]),
        ([], []),
    ],
)
def test_values_may_follow_a_space(given: list[str], joined: list[str]) -> None:
    assert join_values(given) == tuple(joined)


def test_the_port_of_the_configuration_is_the_default_of_port(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("Frontend: {port: 8123}")
    assert port_in(path, ()) == 8123
    assert port_in(path, ["--Frontend.port=9000"]) == 9000
    assert port_in(None, ["--Frontend.api-key-file=x"]) is None
    serve = ["serve", "examples.llm.graphs.agg:Frontend", "-f", str(path), *MOCKERS]
    for options, port in (([], 8123), (["--port=8001"], 8001)):
        assert run([*serve, *options]) == 0
        assert f"http://127.0.0.1:{port}\n" in capsys.readouterr().out


@pytest.mark.parametrize("port", ["http", "-1", "65536", "true", "1.5"])
def test_what_is_no_port_is_refused(port: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f"Frontend: {{port: {port}}}")
    with pytest.raises(ConfigError, match=r"Frontend\.port is"):
        port_in(path, ())


@pytest.mark.parametrize("option", REMEDIES)
def test_an_option_of_dynamo_s_serve_is_refused_with_its_remedy(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["serve", "examples.llm.graphs.agg:Frontend", option]) == 2
    assert capsys.readouterr().err == f"error: there is no option {option}; {REMEDIES[option]}\n"


# The flags of Dynamo's planner: examples/llm/components/planner.py and docs/guides/planner.md of
# https://github.com/ai-dynamo/dynamo, v0.2 and v0.3. None: it is taken; otherwise what is said.
PLANNER_FLAGS: list[tuple[list[str], str | None]] = [
    (["--namespace", "nowhere"], None),
    (["--namespace=nowhere"], None),
    (["--served-model-name", "vllm"], None),
    (["--no-operation"], None),
    (["--log-dir", "log/planner"], None),
    (["--adjustment-interval", "15"], None),
    (["--metric-pulling-interval=1"], None),
    (["--max-gpu-budget", "8"], None),
    (["--min-gpu-budget", "1"], None),
    (["--min-endpoint", "1"], None),
    (["--decode-kv-scale-up-threshold", "0.8"], None),
    (["--decode-kv-scale-down-threshold", "0.4"], None),
    (["--prefill-queue-scale-up-threshold", "10"], None),
    (["--prefill-queue-scale-down-threshold", "0.2"], None),
    (["--decode-engine-num-gpu", "1"], None),
    (["--prefill-engine-num-gpu", "1"], None),
    (["--environment", "local"], None),
    (["--environment", "kubernetes"], "'kubernetes' is not 'local'"),
    (["--min-endpoint", "0"], "min-endpoint is 0; it must be at least 1"),
    (["--ttft", "0.5"], "there is no option --ttft"),
]


@pytest.mark.parametrize(("flags", "said"), PLANNER_FLAGS, ids=lambda value: " ".join(value or ["taken"]))
def test_the_flags_of_dynamo_s_planner(
    flags: list[str],
    said: str | None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """A flag that is taken leads on to the search for the server."""
    monkeypatch.setenv("DYN_LOCAL_STATE_DIR", str(tmp_path))
    monkeypatch.delenv("DYN_NAMESPACE", raising=False)
    code = run(["planner", *flags])
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    if said is None:
        assert (code, "no server runs" in error) == (2, True), error
    else:
        assert (code, said in error) == (2, True), error


def test_the_planner_s_script_is_the_planner_of_the_command_line(tmp_path: Path) -> None:
    """By the path, the working directory and the import path of Dynamo's documentation."""
    script = (
        "components/planner.py",
        "--namespace=dynamo",
        "--served-model-name=vllm",
        "--no-operation",
        "--log-dir=log",
    )
    path = os.pathsep.join((str(EXAMPLES), str(REPOSITORY)))
    done = python(*script, cwd=EXAMPLES, PYTHONPATH=path, DYN_LOCAL_STATE_DIR=str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: no server runs in namespace dynamo")
    assert not (EXAMPLES / "log").exists()
