"""The model `random`: the same everywhere, made once, loadable."""

from __future__ import annotations

import hashlib
import importlib
import json
import multiprocessing
import subprocess
import sys
from pathlib import Path
from typing import Any

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from dynamo_local.core.errors import UsageError
from dynamo_local.model.named.random_model import CHAT_TEMPLATE, random_model

WEIGHTS_SHA256 = "4032b616b7bd24ad579422f370b933da5d322b1d865ab5fcf362f1064bf348bc"
"""Changes only when the recipe is changed on purpose."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model / "tokenizer.json"))


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_weights_are_the_same_bytes_everywhere(model: Path) -> None:
    assert hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest() == WEIGHTS_SHA256


def test_made_once(tmp_path: Path) -> None:
    first = random_model(tmp_path)
    made_at = (first / "model.safetensors").stat().st_mtime_ns
    assert random_model(tmp_path) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == made_at


def test_cache_is_private_and_holds_nothing_else(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    folder = random_model(root)
    assert root.stat().st_mode & 0o777 == 0o700
    assert list(folder.parent.iterdir()) == [folder]


def test_cache_root_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_LOCAL_CACHE_DIR", str(tmp_path / "named"))
    assert random_model().is_relative_to(tmp_path / "named")


def test_concurrent_makers_agree(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        folders = set(pool.map(random_model, [tmp_path] * 8, chunksize=1))
    (folder,) = folders
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert list(folder.parent.iterdir()) == [folder]


def test_unwritable_cache_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="DYN_LOCAL_CACHE_DIR"):
        random_model(tmp_path / "file" / "cache")


def test_missing_library_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    done = python(
        "import sys; from pathlib import Path; sys.modules['tokenizers'] = None\n"
        "from dynamo_local.model.named.random_model import random_model\n"
        f"random_model(Path({str(tmp_path)!r}))"
    )
    last = done.stderr.strip().splitlines()[-1]
    assert "UsageError" in last
    assert "'tokenizers'" in last
    assert "dynamo-local[cpu]" in last
    assert not list((tmp_path / "models").iterdir())


def test_libraries_are_imported_only_when_a_model_is_made() -> None:
    done = python(
        "import sys, dynamo_local.model.named.random_model\n"
        "print([name for name in ('numpy', 'safetensors', 'tokenizers') if name in sys.modules])"
    )
    assert done.stdout.strip() == "[]"


@given(st.text())
def test_tokens_are_bytes(tokenizer: Tokenizer, text: str) -> None:
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokens == list(text.encode())
    assert tokenizer.decode(tokens) == text


def test_plain_text_gets_a_bos(tokenizer: Tokenizer, model: Path) -> None:
    bos = json.loads((model / "config.json").read_text())["bos_token_id"]
    assert tokenizer.encode("a").ids == [bos, ord("a")]


@pytest.mark.parametrize(
    ("messages", "ask", "expected"),
    [
        ([{"role": "user", "content": "Hi"}], True, "<s><|user|>Hi</s><|assistant|>"),
        ([{"role": "user", "content": "Hi"}], False, "<s><|user|>Hi</s>"),
        (
            [{"role": "developer", "content": "Be brief"}, {"role": "assistant", "content": None}],
            False,
            "<s><|system|>Be brief</s><|assistant|></s>",
        ),
    ],
)
def test_chat_template(messages: list[dict[str, Any]], ask: bool, expected: str) -> None:
    template = jinja2.Environment(autoescape=False).from_string(CHAT_TEMPLATE)
    rendered = template.render(messages=messages, add_generation_prompt=ask, bos_token="<s>", eos_token="</s>")
    assert rendered == expected


def test_roles_are_single_tokens(tokenizer: Tokenizer) -> None:
    for role in ("system", "user", "assistant", "tool"):
        assert len(tokenizer.encode(f"<|{role}|>", add_special_tokens=False).ids) == 1


def test_transformers_loads_it_and_greedy_text_is_readable_and_repeatable(model: Path) -> None:
    transformers: Any = importlib.import_module("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello!"}], add_generation_prompt=True, return_tensors="pt"
    )["input_ids"]
    texts = set()
    for _ in range(2):
        llama = transformers.AutoModelForCausalLM.from_pretrained(model)
        assert str(llama.dtype) == "torch.float32"
        tokens = llama.generate(prompt, do_sample=False, max_new_tokens=64)[0, prompt.shape[1] :]
        assert len(tokens) == 64
        texts.add(tokenizer.decode(tokens))
    (text,) = texts
    assert text.isascii()
    assert text.isprintable()
    assert len(set(text)) > 8
