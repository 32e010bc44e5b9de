"""Programs are run as they stand on the page, and what fails says why."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.clients import nginx, run
from tests.clients.environments import Environment
from tests.clients.model import THINK, thinking_model
from tests.clients.recipes import Client, OwnEnvironment

HERE = Environment("1.0", Path(sys.executable).parent)
SERVER = "127.0.0.1:1234"


def ran(*programs: str, **page: str) -> run.Result:
    names = tuple(f"{name}.py" for name in programs)
    client = Client("some", OwnEnvironment("some"), names, "something")
    blocks = {f"{name}.py": text for name, text in page.items()}
    return run.run(client, HERE, blocks, SERVER, Path("/model"))


def test_a_program_that_ends_well_has_passed() -> None:
    result = ran("good", good="import os; assert os.environ['TOKENIZER'] == '/model'")
    assert (result.passed, result.version, result.complaint) == (True, "1.0", "")


def test_a_program_asks_the_server_that_runs() -> None:
    assert ran("good", good=f"assert '127.0.0.1:8000' == '{SERVER}'").passed


def test_a_failed_program_says_why_and_those_after_it_do_not_run() -> None:
    result = ran("good", "bad", "worse", good="pass", bad="assert 1 == 2, 'no match'", worse="print('was run')")
    assert not result.passed
    assert "bad.py ended with 1" in result.complaint
    assert "no match" in result.complaint
    assert "was run" not in result.complaint


def test_a_program_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "PROGRAM_WITHIN_S", 0.2)
    assert "not finished after 0.2 s" in ran("endless", endless="import time\nwhile True: time.sleep(1)").complaint


def test_keys_of_the_user_are_not_seen_by_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    assert ran("good", good="import os; assert 'OPENAI_API_KEY' not in os.environ").passed


def test_without_nginx_the_complaint_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    with pytest.raises(nginx.NginxError, match="apt install nginx"):
        nginx.command()


def test_nginx_keeps_its_files_in_its_folder() -> None:
    changed = nginx.in_folder("events {}\nhttp {\n    server {}\n}\n")
    assert changed.count("_temp_path") == 5
    assert changed.startswith("events {}\nhttp {\n    access_log off;\n")


def test_the_model_can_be_told_to_think(tmp_path: Path) -> None:
    folder = thinking_model(tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for number, token in THINK.items():
        assert tokenizer.token_to_id(token) == number
        assert tokenizer.encode(f"a{token}b", add_special_tokens=False).ids == [ord("a"), number, ord("b")]
    assert tokenizer.decode(tokenizer.encode("Grüße, 世界").ids) == "Grüße, 世界"
    template = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    assert "<|assistant|>{% if enable_thinking %}<think>{% else %}<think></think>{% endif %}" in template
