"""Mistakes on the command line: what is typed, what is said in one line, and the exit code. Nothing is left behind.

A new command adds its mistakes to the tables here. Texts are regular expressions: the cause, then the remedy.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from dynamo_local.cli.main import run
from tests.integration.server_process import PATIENCE_S
from tests.integration.supervisor.scaled_server import ScaledServer

GRAPH = "tests.unit.cli.graph:Front"
MOCKERS = "examples.llm.graphs.agg:Frontend --VllmWorker.engine=mocker"

FILES = {
    "binary.yaml": b"\x00\xff\xfe\x01",
    "tab.yaml": b"Worker:\n\tseed: 1\n",
    "brace.yaml": b"Worker: {seed: 1\n",
    "nul.yaml": b"a\0b",
    "list.yaml": b"- Worker\n",
    "scalar.yaml": b"Worker: 3\n",
    "twice.yaml": b"Worker:\n  seed: 1\n  seed: 2\n",
    "service.yaml": b"Wroker:\n  seed: 1\n",
    "key.yaml": b"Worker:\n  sede: 1\n",
    "type.yaml": b"Worker:\n  seed: many\n",
    "args.yaml": b"Worker:\n  ServiceArgs: {worker: 2}\n",
    "workers.yaml": b"Worker:\n  ServiceArgs: {workers: 0}\n",
    "envs.yaml": b"Worker:\n  ServiceArgs: {envs: {A: 1.5}}\n",
    "devices.yaml": b"Worker:\n  ServiceArgs: {resources: {gpu: -1}}\n",
    "common.yaml": b"Common: {seed: 1}\n",
    "endpoints.yaml": b"endpoints: {chat: {model: random}}\n",
    "nameless.yaml": b"endpoints:\n  - {name: chat, model: random}\n  - {model: random}\n",
    "field.yaml": b"endpoints:\n  - {name: chat, model: random, max_wokers: 2}\n",
    "bounds.yaml": b"endpoints:\n  - {name: chat, model: random, min_workers: 3, max_workers: 2}\n",
    "double.yaml": b"endpoints:\n  - {name: chat, model: random}\n  - {name: chat, model: smollm2}\n",
    "base.yaml": b"endpoints:\n  - {name: fr, model: /lora, adapter_of: chat}\n",
    "token.yaml": b"endpoints:\n  - {name: chat, model: random, args: {hf-token: hf_secret}}\n",
    "graph.yaml": b"endpoints:\n  - {name: chat, model: 'a.b:C'}\n",
    "models.yaml": b"endpoints:\n  - {name: chat, model: random, engine: mocker}\n",
    "beside.yaml": b"VllmWorker: {seed: 1}\nendpoints:\n  - {name: chat, model: random}\n",
    "empty.json": b"",
    "text.json": b"hello",
    "plain_graph.py": b"class Front: pass\n",
    "raising_graph.py": b"raise RuntimeError('two\\nlines')\n",
    "ending_graph.py": b"raise SystemExit(3)\n",
    "misspelt_graph.py": b"def f(:\n",
    "needy_graph.py": b"import no_such_package_anywhere\n",
}
"""Files in the working directory."""

# Words that are typed; {port} is a port in use.
NO_SERVER: list[tuple[str, str, int]] = [
    # Commands and options
    ("frobnicate", r"no command dynamo frobnicate; see `dynamo --help`", 2),
    ("scael VllmWorker=2", r"no command dynamo scael; did you mean scale", 2),
    ("queue lss", r"no command dynamo queue lss; did you mean ls\?", 2),
    ("--frob", r"no option --frob; see `dynamo --help`", 2),
    ("ps --jsn", r"no option --jsn; did you mean --json\?", 2),
    ("ps extra", r"unexpected extra argument \(extra\); see `dynamo ps --help`", 2),
    ("ps --namespace", r"'--namespace' requires an argument; `--help` after the command", 2),
    ("top --once=3", r"'--once' does not take a value; `--help` after the command", 2),
    ("ps --namespace a_b", r"namespace 'a_b' is not valid; use letters, digits and inner hyphens", 2),
    ("serve --model=", r"--model is empty; name a folder, a Hugging Face id, or one of ", 2),
    # The graph
    ("serve no_such_package.graph:Front", r"no module no_such_package; modules in the working directory: ", 2),
    ("serve tests.unit.cli.grahp:Front", r"no module tests\.unit\.cli\.grahp; .*did you mean graph\?", 2),
    ("serve tests.unit.cli.graph:Frnt", r"has no Frnt; services there: Front, Worker; did you mean Front\?", 2),
    ("serve tests.unit.cli.graph:WorkerSettings", r"is not decorated with @service; services there: ", 2),
    ("serve plain_graph:Front", r"is not decorated with @service; services there: none", 2),
    (
        "serve raising_graph:Front",
        r"cannot be imported: RuntimeError: two lines; `python -c 'import raising_",
        2,
    ),
    ("serve ending_graph:Front", r"cannot be imported: SystemExit: 3; `python -c 'import ending_graph'` shows", 2),
    ("serve misspelt_graph:Front", r"SyntaxError: .*\(misspelt_graph\.py, line 1\); ", 2),
    ("serve needy_graph:Front", r"needs no_such_package_anywhere, which is not installed; install it", 2),
    (f"serve {GRAPH} extra", r"'extra' is one argument too many; write values as --key=value", 2),
    (f"serve {GRAPH} --json", r"--json goes with --explain and --dry-run only; add --explain", 2),
    ("serve graphs.agg:Frontend", r"there is no module graphs; did you mean examples\.llm\.graphs\.agg\?", 2),
    # Where the API listens
    (f"serve {GRAPH} --port=70000", r"70000 is not in the range 0<=x<=65535; see `dynamo serve --help`", 2),
    (f"serve {GRAPH} --port=-1", r"-1 is not in the range 0<=x<=65535; see ", 2),
    (f"serve {GRAPH} --port=http", r"'http' is not an integer; see `dynamo serve --help`", 2),
    (f"serve {GRAPH} --port=" + "9" * 30, r"9{30} is not in the range 0<=x<=65535; see ", 2),
    (f"serve {GRAPH} --port={{port}}", r"port \d+ on 127\.0\.0\.1 is in use.*; pass another --port", 2),
    (f"serve {GRAPH} --host=203.0.113.1", r"cannot listen on 203\.0\.113\.1:8000: .*; pass another --host", 2),
    # The configuration file
    (f"serve {GRAPH} -f missing.yaml", r"cannot read configuration missing\.yaml: No such file", 2),
    (f"serve {GRAPH} -f .", r"cannot read configuration \.: Is a directory", 2),
    (f"serve {GRAPH} -f /proc/self/mem", r"cannot read configuration /proc/self/mem: Input/output error", 2),
    (f"serve {GRAPH} -f binary.yaml", r"cannot read configuration binary\.yaml: it is not UTF-8 text", 2),
    (f"serve {GRAPH} -f tab.yaml", r"tab\.yaml: line 2, column 1 is not YAML: found character '\\t'", 2),
    (f"serve {GRAPH} -f brace.yaml", r"brace\.yaml: line 2, column 1 is not YAML: expected ',' or '}'", 2),
    (f"serve {GRAPH} -f nul.yaml", r"nul\.yaml is not YAML; write `Service:` with", 2),
    (f"serve {GRAPH} -f list.yaml", r"list\.yaml is a list; write `endpoints:` in a line above it", 2),
    (f"serve {GRAPH} -f scalar.yaml", r"scalar\.yaml: Worker is not a mapping; write `key: value` lines under it", 2),
    (f"serve {GRAPH} -f twice.yaml", r"twice\.yaml: line 3, column 3 .*key 'seed' occurs twice", 2),
    (f"serve {GRAPH} -f service.yaml", r"the graph has no service Wroker; did you mean Worker\?", 2),
    (f"serve {GRAPH} -f key.yaml", r"key\.yaml: Worker has no key sede; did you mean seed\?", 2),
    (f"serve {GRAPH} -f type.yaml", r"type\.yaml: Worker\.seed is 'many'; expected int", 2),
    (f"serve {GRAPH} -f args.yaml", r"Worker\.ServiceArgs has no key worker; did you mean workers\?", 2),
    (f"serve {GRAPH} -f workers.yaml", r"Worker\.ServiceArgs\.workers is 0; expected int of at least 1", 2),
    (f"serve {GRAPH} -f envs.yaml", r"Worker\.ServiceArgs\.envs\.A is not text; put its value in quotes", 2),
    (f"serve {GRAPH} -f devices.yaml", r"resources\.gpu must be a whole number of devices, .*not -1", 2),
    (f"serve {GRAPH} -f common.yaml", r"no service takes Common\.seed; list it in the common-configs of one, or ", 2),
    # Endpoints in a file
    ("serve", r"no graph named, and no model; write `dynamo serve MODEL` .*, or list endpoints in a file", 2),
    ("serve -f endpoints.yaml", r"endpoints\.yaml: endpoints is not a list; write `endpoints:` with ", 2),
    ("serve -f nameless.yaml", r"nameless\.yaml: endpoints\[1\]: endpoint has no name; write name: chat", 2),
    ("serve -f field.yaml", r"field\.yaml: endpoints\[0\]: .* no field max_wokers; did you mean max_workers", 2),
    ("serve -f bounds.yaml", r"endpoint chat: max_workers is 2, below min_workers, which is 3; raise max_workers", 2),
    ("serve -f double.yaml", r"double\.yaml: endpoint chat is given twice; rename one of them", 2),
    ("serve -f base.yaml", r"endpoint fr: its base chat does not exist; endpoints are: none", 2),
    ("serve -f token.yaml", r"endpoint chat: args\.hf-token looks like a secret, .*; set it in the environment", 2),
    ("serve -f graph.yaml", r"'a\.b:C' is a graph, and an endpoint has a model; name a folder", 2),
    ("serve -f beside.yaml", r"beside\.yaml: the graph has no service VllmWorker; it has ", 2),
    ("serve -f models.yaml --workers 2", r"--workers goes with a model, and none is named; set min_workers of each", 2),
    ("serve -f models.yaml --seed 3", r"--seed goes with a model, and none is named; write it under args of an", 2),
    ("serve -f models.yaml --explain", r"what is chosen for a model, and none is named; use --dry-run", 2),
    # Settings of services
    (f"serve {GRAPH} --Wroker.seed=1", r"--Wroker\.seed: the graph has no service Wroker; did you mean Worker\?", 2),
    (f"serve {GRAPH} --Worker.sede=1", r"--Worker\.sede: Worker has no key sede; did you mean seed\?", 2),
    (f"serve {GRAPH} --Worker.seed=many", r"--Worker\.seed: Worker\.seed is 'many'; expected int", 2),
    (f"serve {GRAPH} --Worker.seed=1.5", r"--Worker\.seed: Worker\.seed is 1\.5; expected int", 2),
    (f"serve {GRAPH} --Worker.seed=" + "9" * 40, r"Worker\.seed is 9{40}; expected integers of at most 64 bits", 2),
    (f"serve {GRAPH} --Worker.seed", r"--Worker\.seed has no value; write --Worker\.seed=VALUE", 2),
    (f"serve {GRAPH} --Worker.ServiceArgs.wrokers=2", r"has no key wrokers; did you mean workers\?", 2),
    (f"serve {GRAPH} --Worker.ServiceArgs.workers=3", r"0 of 2 CPU slots are free; ask for fewer workers", 2),
    (f"serve {GRAPH} --Worker.ServiceArgs.workers=" + "9" * 12, r"2 CPU slots are free; ask for fewer workers", 2),
    (f"serve {GRAPH} --Worker.ServiceArgs.resources.gpu=3", r"Worker needs 3 devices, 2 of 2 .*; ask for fewer", 2),
    (f"serve {MOCKERS} --VllmWorker.mocker-sped=2", r"has no key mocker-sped; did you mean mocker-speedup", 2),
    (f"serve {MOCKERS} --VllmWorker.mocker-speedup=-1", r"mocker-speedup must be above 0, not -1", 2),
    ("serve examples.llm.graphs.agg:Frontend --VllmWorker.engine=moker", r"'moker'; expected one of vllm, mocker", 2),
    ("serve examples.llm.graphs.agg:Frontend --Planner.max-gpu-budget=0", r"is 0; it must be at least 1", 2),
    # The server
    (f"serve {GRAPH} --namespace=a/b", r"namespace 'a/b' is not valid; use letters, digits and inner hyphens", 2),
    (f"serve {GRAPH} --namespace=größe", r"namespace 'größe' is not valid; use letters, digits", 2),
    (f"serve {GRAPH} --namespace=" + "n" * 41, r"is not valid; use letters, .*, at most 40 characters", 2),
    (f"serve {GRAPH} --nats-url=http://x", r"not an address of a NATS server; expected nats://HOST:PORT", 2),
    (f"serve {GRAPH} --nats-url=nats://127.0.0.1:1", r"NATS at nats://127\.0\.0\.1:1 .*; ", 1),
    (f"serve {GRAPH} --cpu-slots=0", r"0 is not in the range x>=1; see `dynamo serve --help`", 2),
    (f"serve {GRAPH} --cpu-slots=100000", r"100000 CPU slots were asked for; ask for 1 to 1024", 2),
    (f"serve {GRAPH} --ready-timeout=0", r"0\.0 is not in the range x>0; see `dynamo serve --help`", 2),
    ("serve random --ready-timeout nan", r"nan is not a finite number; see `dynamo serve --help`", 2),
    ("serve random --drain-timeout inf", r"inf is not a finite number; see `dynamo serve --help`", 2),
    # Commands on a server, where none runs
    ("ps", r"no server runs; start one", 2),
    ("ps --namespace=second", r"no server runs in namespace second; ", 2),
    ("top --once", r"no server runs; start one", 2),
    ("logs", r"none has left logs; start one", 2),
    ("stop", r"no server runs", 2),
    ("requests", r"no server runs; start one", 2),
    ("migrate cmpl-1", r"no server runs; start one", 2),
    ("queue ls", r"no server runs; start one", 2),
    ("queue purge -y", r"no server runs; start one", 2),
    ("config get", r"no server runs; start one", 2),
    ("scale VllmWorker=2", r"no server runs; start one", 2),
    ("drain VllmWorker", r"no server runs; start one", 2),
    ("restart VllmWorker", r"no server runs; start one", 2),
    ("role VllmWorker prefill", r"no server runs; start one", 2),
    ("planner", r"no server runs; start one", 2),
    ("describe VllmWorker", r"no server runs; start one", 2),
    ("events", r"no server runs, .*; start one", 2),
    ("endpoint list", r"no server runs; start one", 2),
    ("endpoint get chat", r"no server runs; start one", 2),
    ("endpoint create chat --model random", r"no server runs; start one", 2),
    ("endpoint update chat --set gpu=1", r"no server runs; start one", 2),
    ("endpoint delete chat", r"no server runs; start one", 2),
    ("endpoint logs chat", r"none has left logs; start one", 2),
    ("stop --forget", r"no server runs", 2),
    # Arguments that no server is needed to refuse
    ("endpoint creat chat", r"no command dynamo endpoint creat; did you mean create\?", 2),
    ("endpoint create", r"NAME .* is missing; the usage is `dynamo endpoint create ", 2),
    ("endpoint create chat", r"endpoint chat has no model; write model: Qwen/Qwen3-0\.6B", 2),
    ("endpoint create Chat --model random", r"'Chat' is no name for an endpoint; use small letters, digits", 2),
    ("endpoint create chat --model random --gpu=1.5", r"endpoint chat: gpu is 1\.5; write a number of devices", 2),
    ("endpoint update chat", r"nothing is to be changed; name a field: --set max_workers=4", 2),
    ("endpoint update chat --set max_workers", r"--set 'max_workers' has no value; write --set KEY=VALUE", 2),
    ("describe", r"WATCHER\|ENDPOINT\|REQUEST is missing; the usage is `dynamo describe ", 2),
    ("events -n many", r"'many' is not an integer; see `dynamo events --help`", 2),
    ("wait --timeout=soon", r"'soon' is not a number; see `dynamo wait --help`", 2),
    ("ls --jsn", r"no option --jsn; did you mean --json\?", 2),
    ("doctor --fixx", r"no option --fixx; did you mean --fix\?", 2),
    ("run", r"MODEL is missing; the usage is `dynamo run \[OPTIONS\] MODEL", 2),
    ("chat", r"a chat needs a terminal; write `dynamo run MODEL", 2),
    ("completion tcsh", r"'tcsh' is not one of 'bash', 'zsh', 'fish'; see `dynamo completion --help`", 2),
    ("logs -n many", r"'many' is not an integer; see `dynamo logs --help`", 2),
    ("stop --timeout=0", r"0\.0 is not in the range x>0; see `dynamo stop --help`", 2),
    ("migrate", r"name either a request or a worker to migrate from; give REQUEST or --from WATCHER", 2),
    ("migrate cmpl-1 --from VllmWorker", r"name either a request or a worker .*; give REQUEST or --from", 2),
    ("config set rebalance", r"VALUE is missing; the usage is `dynamo config set \[OPTIONS\] KEY VALUE`", 2),
    ("scale", r"SERVICE\|ENDPOINT=NUMBER\.\.\. is missing; the usage is `dynamo scale ", 2),
    ("drain", r"WATCHER is missing; the usage is `dynamo drain \[OPTIONS\] WATCHER`", 2),
    ("restart", r"SERVICE\|ENDPOINT\|WATCHER is missing; the usage is `dynamo restart ", 2),
    ("role VllmWorker prefil", r"'prefil' is not one of 'prefill', 'decode'; see `dynamo role --help`", 2),
    ("planner --max-gpu-budget=0", r"max-gpu-budget is 0; it must be at least 1", 2),
    ("planner --max-gpu-bugdet=3", r"no option --max-gpu-bugdet; did you mean --max-gpu-budget", 2),
    ("planner --adjustment-interval=soon", r"'soon' is not a number; see `dynamo planner --help`", 2),
    ("load", r"no load named; write --rate 5, --trace FILE or --concurrency 8", 2),
    ("load --rate=5 --url=http://127.0.0.1:1", r"cannot connect: .*; .*see --url", 1),
    ("load compare missing.json other.json", r"cannot read missing\.json: No such file", 2),
    ("load compare . other.json", r"cannot read \.: Is a directory", 2),
    ("load compare empty.json text.json", r"empty\.json is not a file of `dynamo load --json`", 2),
]

ON_SERVER: list[tuple[str, str, int]] = [
    ("serve tests.unit.cli.graph:Front --namespace=scaled --port=0", r"already runs .*; stop it with `dynamo stop", 2),
    ("ps --namespace=other", r"no server runs in namespace other; servers run in: scaled", 2),
    ("stop --namespace=other", r"no server runs in namespace other; servers run in: scaled", 2),
    ("logs Wroker", r"no log of 'Wroker'; there are: .*VllmWorker", 2),
    ("migrate --from nobody", r"no worker 'nobody'; there are: VllmWorker, PrefillWorker", 2),
    ("migrate --from VllmWorker --to PrefillWorker", r"PrefillWorker prefills, .*; there are: VllmWorker", 2),
    ("scale Nope=2", r"'Nope' is not a service of workers; those of this graph are: VllmWorker, PrefillWorker", 2),
    ("scale Front=2", r"'Front' is not a service of workers; those of this graph are: ", 2),
    ("scale VllmWorker=-1", r"'VllmWorker=-1' does not say how many; write SERVICE=NUMBER", 2),
    ("scale VllmWorker=many", r"'VllmWorker=many' does not say how many; write SERVICE=NUMBER", 2),
    ("scale VllmWorker=9", r"takes 10 devices, and there are 4 CPU slots; ask for fewer workers", 2),
    ("scale VllmWorker=99999", r"99999 is more VllmWorkers than a server can have; ask for fewer workers", 2),
    ("scale VllmWorker=0", r"no worker would be left to answer requests .*; use --force", 2),
    ("scale VllmWorker=1 VllmWorker=2", r"VllmWorker is given twice; give each service and endpoint once", 2),
    ("scale scaled_VllmWorker=2", r"is the name of one process; .*; write VllmWorker=2", 2),
    ("drain nobody", r"no worker 'nobody'; there are: VllmWorker, PrefillWorker", 2),
    ("drain Front", r"no worker 'Front'; there are: VllmWorker, PrefillWorker", 2),
    ("drain VllmWorker", r"no worker would be left to answer requests .*; use --force", 2),
    ("restart nobody", r"no service, endpoint or watcher 'nobody'; there are: ", 2),
    ("restart Front", r"Front holds the clients' connections, .*; end the server with `dynamo stop`", 2),
    ("role nobody prefill", r"no worker 'nobody'; there are: VllmWorker, PrefillWorker", 2),
    ("role VllmWorker prefill", r"VllmWorker is the only one that decodes; .*--force", 2),
    ("config get nope", r"no live setting 'nope'; .*max-local-prefill-length", 2),
    ("config set nope 1", r"no live setting 'nope'; .*max-local-prefill-length", 2),
    ("config set max-prefill-queue-size many", r"'many' is not a value of .*; expected a whole number from 0", 2),
    ("config set max-prefill-queue-size -1", r"'-1' is not a value of .*; expected a whole number from 0", 2),
    ("endpoint get nobody", r"there is no endpoint 'nobody'; there are: none", 2),
    ("endpoint update nobody --set gpu=1", r"there is no endpoint 'nobody'; there are: none", 2),
    ("endpoint delete nobody", r"there is no endpoint 'nobody'; there are: none", 2),
    ("endpoint logs nobody", r"no log of a worker of endpoint 'nobody'; see `dynamo endpoint list`", 2),
    ("endpoint create fr --model /l --adapter-of nobody", r"endpoint fr: its base nobody does not exist; ", 2),
    ("planner --max-gpu-budget=1", r"the workers hold 2 devices; raise max-gpu-budget", 2),
    ("planner --min-gpu-budget=9", r"min-gpu-budget is 9, .* must be at most max-gpu-budget", 2),
]


@pytest.fixture(scope="module", autouse=True)
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("typed")
    for name, data in FILES.items():
        (folder / name).write_bytes(data)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("NATS_SERVER", "NATS_TOKEN", "NATS_CA", "DYN_NAMESPACE", "OPENAI_BASE_URL"):
            patch.delenv(name, raising=False)
        patch.setenv("DYN_CPU_SLOTS", "2")
        patch.syspath_prepend(str(folder))
        patch.chdir(folder)
        yield


@pytest.fixture
def state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DYN_LOCAL_STATE_DIR", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def port() -> Iterator[int]:
    """A port that is in use."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScaledServer]:
    with ScaledServer(tmp_path_factory.mktemp("state")) as server:
        yield server


@pytest.mark.parametrize(("typed", "said", "code"), NO_SERVER, ids=[row[0][:60] for row in NO_SERVER])
def test_a_mistake_is_one_line_and_leaves_nothing(
    typed: str, said: str, code: int, state_folder: Path, port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    before = children()
    check(typed.format(port=port) if "{port}" in typed else typed, said, code, capsys)
    assert children() == before
    assert [path for path in state_folder.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(("typed", "said", "code"), ON_SERVER, ids=[row[0][:60] for row in ON_SERVER])
def test_a_mistake_on_a_server_is_one_line_and_changes_nothing(
    typed: str,
    said: str,
    code: int,
    server: ScaledServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("DYN_LOCAL_STATE_DIR", str(server.paths.root))
    state, before = server.state(), children()
    check(typed, said, code, capsys)
    assert children() == before
    assert server.state() == state


def check(typed: str, said: str, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    # A server that starts in spite of the mistake would run until it is interrupted.
    interrupt = threading.Timer(PATIENCE_S, os.kill, (os.getpid(), signal.SIGINT))
    interrupt.start()
    try:
        ended = run(typed.split(" "))
    finally:
        interrupt.cancel()
        interrupt.join()
    output = capsys.readouterr()
    assert (ended, output.out) == (code, ""), output
    assert output.err.startswith("error: ")
    assert output.err.count("\n") == 1
    assert re.search(said, output.err), output.err


def children() -> set[int]:
    """Pids of the child processes of this process."""
    found: set[int] = set()
    for task in Path(f"/proc/{os.getpid()}/task").iterdir():
        # A thread may end meanwhile.
        with suppress(FileNotFoundError):
            found.update(map(int, (task / "children").read_text().split()))
    return found
