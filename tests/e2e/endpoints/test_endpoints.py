"""Three models at one address, on real vLLM: two generate, one embeds."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.llm_server import PATIENCE_S, LlmServer, child
from tests.e2e.models.adapters import make_adapter
from tests.integration.server_process import eventually

TOKENS = 300
PROMPT = "endpoints are asked by name: "


@pytest.fixture(scope="module")
def http(endpoints: LlmServer) -> httpx.Client:
    return httpx.Client(base_url=endpoints.url, timeout=PATIENCE_S)


@pytest.fixture(scope="module")
def undisturbed(http: httpx.Client) -> dict[str, str]:
    return {model: tell(http, model) for model in ("chat", "story")}


def tell(http: httpx.Client, model: str, begun: threading.Event | None = None, tokens: int = TOKENS) -> str:
    """Return the greedy answer of this model, streamed. `begun` is set with its first token."""
    asked = {"model": model, "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "stream": True}
    text = ""
    with http.stream("POST", "/v1/completions", json={**asked, "ignore_eos": True}) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                assert event["model"] == model
                text += event["choices"][0]["text"]
                if begun is not None:
                    begun.set()
    return text


def embed(http: httpx.Client, text: str) -> list[float]:
    answer = http.post("/v1/embeddings", json={"model": "embed", "input": text})
    assert answer.status_code == 200, answer.text
    vector: list[float] = answer.json()["data"][0]["embedding"]
    return vector


def create_adapter(server: LlmServer, name: str, folder: Path) -> dict[str, str]:
    """Return what the order has come to, as --json shows it."""
    words = ("endpoint", "create", name, "--model", str(folder), "--adapter-of", "chat", "--json")
    ordered: dict[str, str] = json.loads(server.command(*words))["adapter"]
    return ordered


def is_listed(http: httpx.Client, name: str) -> bool:
    return http.get(f"/v1/models/{name}").status_code == 200


def get(server: LlmServer, name: str) -> dict[str, Any]:
    """As `dynamo endpoint get` shows it."""
    found: dict[str, Any] = json.loads(server.command("endpoint", "get", name, "--json"))
    return found


def worker_of(server: LlmServer, endpoint: str) -> int:
    """Pid of the endpoint's only worker."""
    (row,) = [row for row in server.ps() if row.get("endpoint") == endpoint]
    pid: int = row["pid"]
    return pid


def test_each_model_answers_to_its_name(http: httpx.Client, undisturbed: dict[str, str], endpoints: LlmServer) -> None:
    listed = [model["id"] for model in http.get("/v1/models").json()["data"]]
    assert sorted(listed) == ["chat", "embed", "story"]
    assert undisturbed["chat"] != undisturbed["story"]
    with openai.OpenAI(base_url=f"{endpoints.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        asked = client.chat.completions.create(
            model="story", messages=[{"role": "user", "content": "hello"}], max_tokens=5
        )
        assert asked.model == "story"
        vector = client.embeddings.create(model="embed", input="hello").data[0].embedding
    assert math.isclose(math.fsum(x * x for x in vector), 1.0, rel_tol=1e-3)
    assert embed(http, "hello") != embed(http, "goodbye")


def test_lines_of_a_batch_are_embedded_as_requests_are(http: httpx.Client, endpoints: LlmServer) -> None:
    texts = ("hello", "goodbye")
    lines = [
        {"custom_id": text, "method": "POST", "url": "/v1/embeddings", "body": {"model": "embed", "input": text}}
        for text in texts
    ]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    with openai.OpenAI(base_url=f"{endpoints.url}/v1", api_key="none", timeout=PATIENCE_S) as client:
        file = client.files.create(file=("in.jsonl", content), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h")
        eventually(lambda: client.batches.retrieve(batch.id).status == "completed", "a batch does not end", PATIENCE_S)
        ended = client.batches.retrieve(batch.id)
        results = [json.loads(line) for line in client.files.content(str(ended.output_file_id)).text.splitlines()]
    vectors = {each["custom_id"]: each["response"]["body"]["data"][0]["embedding"] for each in results}
    assert vectors.keys() == set(texts)
    for text, vector in vectors.items():
        assert all(math.isclose(one, other, abs_tol=1e-4) for one, other in zip(vector, embed(http, text), strict=True))
    assert ended.usage is not None
    assert ended.usage.input_tokens == sum(each["response"]["body"]["usage"]["prompt_tokens"] for each in results)


@pytest.mark.parametrize(
    ("path", "body", "status", "names"),
    [
        ("/v1/completions", {"model": "nobody", "prompt": "a"}, 404, "nobody"),
        ("/v1/completions", {"prompt": "a"}, 400, "chat"),
        (
            "/v1/embeddings",
            {"model": "chat", "input": "a"},
            404,
            "`chat` does not answer /v1/embeddings; it answers /v1/",
        ),
        (
            "/v1/completions",
            {"model": "embed", "prompt": "a"},
            404,
            "`embed` does not answer /v1/completions; it answers /",
        ),
    ],
)
def test_a_question_to_the_wrong_model_is_refused(
    http: httpx.Client, path: str, body: dict[str, Any], status: int, names: str
) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == status
    assert names in answer.json()["error"]["message"]


def test_the_metrics_of_each_model_have_its_name(http: httpx.Client, undisturbed: dict[str, str]) -> None:
    metrics = http.get("/metrics").text
    for model in undisturbed:
        assert f'vllm:generation_tokens_total{{engine="0",model_name="{model}"}}' in metrics
    assert metrics.count("# TYPE vllm:generation_tokens_total ") == 1


def test_a_killed_engine_concerns_its_own_endpoint_alone(
    endpoints: LlmServer, http: httpx.Client, undisturbed: dict[str, str]
) -> None:
    begun = {model: threading.Event() for model in undisturbed}
    vector = embed(http, PROMPT)
    with ThreadPoolExecutor(2) as pool:
        streams = {model: pool.submit(tell, http, model, begun[model]) for model in undisturbed}
        assert all(event.wait(PATIENCE_S) for event in begun.values())
        os.kill(child(worker_of(endpoints, "chat"), "EngineCore"), signal.SIGKILL)
        again = embed(http, PROMPT)
        assert {model: stream.result(PATIENCE_S) for model, stream in streams.items()} == undisturbed
    assert all(math.isclose(one, other, abs_tol=1e-4) for one, other in zip(vector, again, strict=True))


def test_adapters_come_and_go_beside_their_base(
    endpoints: LlmServer, http: httpx.Client, undisturbed: dict[str, str], tmp_path: Path
) -> None:
    one, two = make_adapter(tmp_path / "one", 1), make_adapter(tmp_path / "two", 2)
    endpoints.command("wait", "chat")
    begun = threading.Event()
    with ThreadPoolExecutor(3) as pool:
        stream = pool.submit(tell, http, "chat", begun)
        assert begun.wait(PATIENCE_S)
        # The workers were started without room for adapters: others start, and who asks meanwhile waits.
        rolled = pool.submit(create_adapter, endpoints, "pirate", one)
        eventually(lambda: is_listed(http, "pirate"), "the adapter is not known", PATIENCE_S)
        held = pool.submit(tell, http, "pirate")
        assert rolled.result()["result"] == "rolled"
        pirate = held.result(PATIENCE_S)
        assert stream.result(PATIENCE_S) == undisturbed["chat"]
    assert create_adapter(endpoints, "robot", two)["result"] == "loaded"
    assert get(endpoints, "chat")["status"]["revision"] == 2
    assert {"pirate", "robot"} <= {model["id"] for model in http.get("/v1/models").json()["data"]}
    robot = tell(http, "robot")
    assert len({undisturbed["chat"], pirate, robot}) == 3
    refuse_what_cannot_be_loaded(endpoints, http, tmp_path)
    begun.clear()
    with ThreadPoolExecutor(1) as pool:
        stream = pool.submit(tell, http, "robot", begun)
        assert begun.wait(PATIENCE_S)
        endpoints.command("endpoint", "delete", "pirate", "--yes")
        assert http.post("/v1/completions", json={"model": "pirate", "prompt": "a"}).status_code == 404
        create_adapter(endpoints, "pirate", two)
        assert tell(http, "pirate") == robot
        assert stream.result(PATIENCE_S) == robot
    with pytest.raises(AssertionError, match="chat is the base of 2 adapters"):
        endpoints.command("endpoint", "update", "chat", "--set", "args.enable-lora=false")
    for name in ("pirate", "robot"):
        endpoints.command("endpoint", "delete", name, "--yes")


def refuse_what_cannot_be_loaded(server: LlmServer, http: httpx.Client, root: Path) -> None:
    """What files tell is refused when it is ordered; what vLLM alone knows fails the adapter at its first request."""
    with pytest.raises(AssertionError, match="has use_dora: true"):
        create_adapter(server, "late", make_adapter(root / "dora", 4, use_dora=True))
    create_adapter(server, "late", make_adapter(root / "late", 5, within=""))
    reason = "none of its tensors is for a module of the model"
    for _ in range(2):
        answer = http.post("/v1/completions", json={"model": "late", "prompt": "a", "max_tokens": 1})
        assert (answer.status_code, answer.headers.get("retry-after")) == (400, None)
        assert answer.json()["error"]["message"].startswith(f"the adapter late cannot be loaded: {reason}")
    eventually(lambda: get(server, "late")["status"]["state"] == "failed", "it has not failed", PATIENCE_S)
    assert get(server, "late")["status"]["reason"].startswith(f"a worker cannot load it: {reason}")
    events = map(json.loads, server.command("events", "--json").splitlines())
    failures = [one["why"] for one in events if (one.get("endpoint"), one["what"]) == ("late", "failed")]
    assert [reason in why for why in failures] == [True]
    server.command("endpoint", "delete", "late", "--yes")


def test_an_update_rolls_under_a_stream(
    endpoints: LlmServer, http: httpx.Client, undisturbed: dict[str, str], tmp_path: Path
) -> None:
    endpoints.command("wait", "chat")
    adapter = make_adapter(tmp_path / "rolled", 3)
    create_adapter(endpoints, "rolled", adapter)
    adapted = tell(http, "rolled", tokens=8)
    begun = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        stream = pool.submit(tell, http, "chat", begun)
        assert begun.wait(PATIENCE_S)
        changes = ("--set", "args.max-num-seqs=8", "--wait")
        update = pool.submit(endpoints.command, "endpoint", "update", "chat", *changes)
        while not update.done():
            assert tell(http, "rolled", tokens=8) == adapted
        update.result()
        assert stream.result(PATIENCE_S) == undisturbed["chat"]
    assert get(endpoints, "chat")["status"]["revision"] == 3
    assert tell(http, "chat") == undisturbed["chat"]
    assert tell(http, "rolled", tokens=8) == adapted


def test_an_update_that_fails_goes_back(endpoints: LlmServer, http: httpx.Client, undisturbed: dict[str, str]) -> None:
    before = get(endpoints, "story")
    with pytest.raises(AssertionError, match=r"max[-_]model[-_]len"):
        endpoints.command("endpoint", "update", "story", "--set", "args.max-model-len=100000000", "--wait")
    after = get(endpoints, "story")
    assert after["spec"] == before["spec"]
    assert after["status"]["state"] == "ready"
    assert tell(http, "story") == undisturbed["story"]


@pytest.mark.ends_server
def test_a_deleted_endpoint_is_gone_and_the_others_stay(
    endpoints: LlmServer, http: httpx.Client, undisturbed: dict[str, str]
) -> None:
    endpoints.command("endpoint", "delete", "story", "--yes", "--wait")
    assert [row for row in endpoints.ps() if row.get("endpoint") == "story"] == []
    assert http.post("/v1/completions", json={"model": "story", "prompt": "a"}).status_code == 404
    assert tell(http, "chat") == undisturbed["chat"]
    endpoints.signal(signal.SIGTERM)
    endpoints.end(PATIENCE_S)
    # What is created stays, and what is deleted does not.
    assert endpoints.paths.registry_file.stat().st_mode & 0o777 == 0o600
    kept = endpoints.paths.registry_file.read_text()
    assert '"chat"' in kept
    assert '"story"' not in kept
