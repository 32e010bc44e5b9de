"""The page of clients, and the recipes of what runs it."""

from __future__ import annotations

import re
from datetime import datetime

import pytest
from packaging.requirements import Requirement

from tests.clients.page import NGINX_PLACE, PAGE, SERVER, SERVER_PLACE, files_of, server_options, with_addresses
from tests.clients.recipes import AS_OF, CLIENTS, Client, NodePackages, PythonPackages

TEXT = PAGE.read_text()
FILES = files_of(TEXT)
EACH_CLIENT = pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)


def test_every_program_of_the_page_is_run_and_every_program_that_is_run_is_on_the_page() -> None:
    used = {name for client in CLIENTS for name in (*client.programs, *client.files)}
    assert used | {SERVER} == set(FILES)


def test_every_block_of_code_has_a_file_name() -> None:
    assert len(re.findall(r"^```\w", TEXT, re.M)) == len(FILES)


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".py")])
def test_programs_in_python_compile(name: str) -> None:
    compile(FILES[name], name, "exec")


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith((".py", ".mjs", ".sh"))])
def test_lines_fit_the_page(name: str) -> None:
    assert max(map(len, FILES[name].splitlines())) <= 120


@EACH_CLIENT
def test_a_client_finds_the_server_where_it_has_been_moved(client: Client) -> None:
    programs = "".join(
        with_addresses(FILES[name], "127.0.0.1:1", "127.0.0.1:2") for name in (*client.programs, *client.files)
    )
    assert "127.0.0.1:1" in programs
    assert SERVER_PLACE not in programs
    assert NGINX_PLACE not in programs


@EACH_CLIENT
def test_a_recipe_pins_what_it_installs(client: Client) -> None:
    recipe = client.environment
    if isinstance(recipe, PythonPackages):
        pins = [[*Requirement(text).specifier] for text in recipe.requirements]
        assert all(len(pin) == 1 and pin[0].operator == "==" and "*" not in pin[0].version for pin in pins)
    elif isinstance(recipe, NodePackages):
        assert all(re.fullmatch(r"(@[\w-]+/)?[\w-]+@\d+\.\d+\.\d+", package) for package in recipe.packages)


def test_what_pinned_packages_need_is_pinned_by_a_date() -> None:
    assert datetime.fromisoformat(AS_OF).tzinfo is not None


def test_names_are_of_one_client_each() -> None:
    assert len({client.name for client in CLIENTS}) == len(CLIENTS)


def test_the_page_starts_the_server() -> None:
    options = server_options(FILES[SERVER])
    assert options[0] == "examples.llm.graphs.agg_router:Frontend"
    assert any(option.startswith("--Frontend.tool-strict-level=") for option in options)


def test_another_command_than_dynamo_serve_is_refused() -> None:
    with pytest.raises(ValueError, match="not `dynamo serve`"):
        server_options("dynamo stop")


def test_blocks_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="two blocks"):
        files_of("```sh a.sh\n1\n```\n\n```sh a.sh\n2\n```\n")


def test_a_block_is_a_file_as_it_stands() -> None:
    assert files_of("text\n\n```python a.py\none\n\ntwo\n```\n\n```sh\nno file\n```\n") == {"a.py": "one\n\ntwo\n"}
