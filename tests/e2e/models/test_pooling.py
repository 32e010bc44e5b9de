"""Models that embed, classify and score, on real vLLM: what they answer, and that it is answered when workers die.

The figures are compared with those of Transformers on the same weights.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from dynamo_local.core.usage.totals import report
from state.machine.processes import alive, start_time
from state.usage.totals import read_usage
from tests.e2e.llm_server import PATIENCE_S, LlmServer, child
from tests.e2e.models.pooling_models import LABELS, make_classifier, make_embedder
from tests.e2e.streams import requests
from tests.integration.server_process import eventually

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch
import transformers

TEXTS = ["hello", "a longer text about nothing at all", "x" * 300, "hello, world"]
CLOSE = 1e-5


@pytest.fixture(scope="module")
def embedder(own_servers: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LlmServer, Path]]:
    """Two workers."""
    folder = tmp_path_factory.mktemp("embedder")
    yield from serving("embedder", make_embedder(folder / "model"), folder, 2)


@pytest.fixture(scope="module")
def classifier(own_servers: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LlmServer, Path]]:
    folder = tmp_path_factory.mktemp("classifier")
    yield from serving("classifier", make_classifier(folder / "model"), folder, 1)


def serving(namespace: str, model: Path, folder: Path, workers: int) -> Iterator[tuple[LlmServer, Path]]:
    options = [str(model), "--served-model-name=tiny", f"--workers={workers}", f"--drain-timeout={PATIENCE_S}"]
    with LlmServer(folder / "state", namespace, options) as server:
        server.await_ready()
        server.await_workers(workers)
        yield server, model
        server.signal(signal.SIGTERM)
        assert server.end(PATIENCE_S) == 0


def post(server: LlmServer, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json={"model": "tiny", **body}, timeout=PATIENCE_S)


def answered(server: LlmServer, path: str, **body: Any) -> Any:
    answer = post(server, path, **body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@torch.inference_mode()
def hidden(folder: Path, kind: Any, text: str) -> Any:
    model = kind.from_pretrained(folder).eval()
    tokens = transformers.AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")
    return model(**{name: tokens[name] for name in ("input_ids", "attention_mask")})


def embedding(folder: Path, text: str) -> torch.Tensor:
    """The state of the first token, of length 1: what vLLM takes for a BERT."""
    state = hidden(folder, transformers.AutoModel, text).last_hidden_state[0, 0]
    return torch.nn.functional.normalize(state, dim=0)


def same(found: Any, expected: torch.Tensor) -> bool:
    return torch.allclose(torch.tensor(found), expected, atol=CLOSE)


def test_embeddings_are_those_of_the_model(embedder: tuple[LlmServer, Path]) -> None:
    server, folder = embedder
    before = report(read_usage(server.paths)).total.prompt
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=PATIENCE_S) as client:
        # In base64, which this client asks for by itself, and as numbers.
        found = client.embeddings.create(model="tiny", input=TEXTS)
        plain = client.embeddings.create(model="tiny", input=TEXTS[0], encoding_format="float")
    assert [each.index for each in found.data] == list(range(len(TEXTS)))
    assert found.usage.prompt_tokens > 0
    told = found.usage.prompt_tokens + plain.usage.prompt_tokens
    assert report(read_usage(server.paths)).total.prompt - before == told
    for each, text in zip(found.data, TEXTS, strict=True):
        assert same(each.embedding, embedding(folder, text))
    assert plain.data[0].embedding == pytest.approx(found.data[0].embedding)


def test_scores_of_embeddings(embedder: tuple[LlmServer, Path]) -> None:
    server, folder = embedder
    query, *others = TEXTS
    expected = [float(embedding(folder, query) @ embedding(folder, other)) for other in others]
    for path in ("/v1/score", "/score"):
        found = answered(server, path, text_1=query, text_2=others)["data"]
        assert [each["score"] for each in found] == pytest.approx(expected, abs=CLOSE)
    for path in ("/v1/rerank", "/v2/rerank", "/rerank"):
        ranked = answered(server, path, query=query, documents=others)["results"]
        by_index = {each["index"]: each["relevance_score"] for each in ranked}
        assert [by_index[index] for index in range(len(others))] == pytest.approx(expected, abs=CLOSE)
        assert [each["relevance_score"] for each in ranked] == sorted(by_index.values(), reverse=True)


def test_other_paths_to_embeddings(embedder: tuple[LlmServer, Path]) -> None:
    server, folder = embedder
    (pooled,) = answered(server, "/pooling", input=TEXTS[0])["data"]
    assert same(pooled["data"], embedding(folder, TEXTS[0]))
    cohere = answered(server, "/v2/embed", texts=TEXTS, embedding_types=["float"])["embeddings"]["float"]
    assert all(same(found, embedding(folder, text)) for found, text in zip(cohere, TEXTS, strict=True))


def test_what_an_embedder_does_not_do_is_refused(embedder: tuple[LlmServer, Path]) -> None:
    server, _ = embedder
    assert post(server, "/v1/completions", prompt="hello").status_code == 404
    assert post(server, "/classify", input="hello").status_code == 404
    assert post(server, "/pooling", input="hello", task="classify").status_code == 400
    assert post(server, "/v1/embeddings", input="x" * 1000).status_code == 400
    assert post(server, "/v1/embeddings", input="hello", dimensions=5).status_code == 400
    assert post(server, "/v1/embeddings", input="hello").status_code == 200


def test_all_inputs_are_answered_when_their_worker_dies(embedder: tuple[LlmServer, Path]) -> None:
    """The engine of one worker is halted, so that its inputs wait, and the worker is killed."""
    server, folder = embedder
    worker = server.pid("VllmWorker_1")
    engine = child(worker, "EngineCore")
    started = start_time(engine)
    assert started is not None
    os.kill(engine, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(answered, server, "/v1/embeddings", input=TEXTS * 50)
        eventually(lambda: waits_there(server, "embedder_VllmWorker_1"), "no input waits at that worker", PATIENCE_S)
        os.kill(worker, signal.SIGKILL)
        found = asked.result(PATIENCE_S)["data"]
    expected = [embedding(folder, text) for text in TEXTS]
    assert len(found) == 50 * len(TEXTS)
    assert all(same(each["embedding"], expected[each["index"] % len(TEXTS)]) for each in found)
    assert not alive(engine, started)


def waits_there(server: LlmServer, worker: str) -> bool:
    """Whether all that is under way is with this worker."""
    rows = requests(server)
    return bool(rows) and all(row["worker"] == worker for row in rows)


def test_classes_are_those_of_the_model(classifier: tuple[LlmServer, Path]) -> None:
    server, folder = classifier
    found = answered(server, "/classify", input=TEXTS)["data"]
    for each, text in zip(found, TEXTS, strict=True):
        logits = hidden(folder, transformers.AutoModelForSequenceClassification, text).logits[0]
        assert same(each["probs"], torch.softmax(logits, 0))
        assert each["label"] == LABELS[int(logits.argmax())]


def test_a_classifier_pools(classifier: tuple[LlmServer, Path]) -> None:
    server, _ = classifier
    (classes,) = answered(server, "/classify", input=TEXTS[0])["data"]
    (found,) = answered(server, "/pooling", input=TEXTS[0])["data"]
    assert found["data"] == pytest.approx(classes["probs"])
    assert post(server, "/v1/embeddings", input="hello").status_code == 404
