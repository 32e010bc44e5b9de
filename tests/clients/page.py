"""Extracts the programs of docs/guides/clients.md: blocks of code with a file name after the language."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/guides/clients.md"
SERVER = "server.sh"
"""The block with the command that starts the server."""
SERVER_PLACE, NGINX_PLACE = "127.0.0.1:8000", "127.0.0.1:8080"
"""Addresses of the server and of nginx in the page's programs."""

_BLOCK = re.compile(r"^```\w+ (\S+)\n(.*?)^```$", re.M | re.S)


def files_of(text: str) -> dict[str, str]:
    """Return the contents of the page's files by name. Raises ValueError for a name that occurs twice."""
    found: dict[str, str] = {}
    for name, content in _BLOCK.findall(text):
        if name in found:
            raise ValueError(f"two blocks are called {name}")
        found[name] = content
    return found


def server_options(command: str) -> list[str]:
    """Return the arguments of `dynamo serve` in the page's command."""
    words = shlex.split(command.replace("\\\n", " "))
    if words[:2] != ["dynamo", "serve"]:
        raise ValueError(f"not `dynamo serve`: {command}")
    return words[2:]


def with_addresses(content: str, server: str, nginx: str) -> str:
    """Return a program with these addresses, each HOST:PORT, in place of the page's."""
    return content.replace(SERVER_PLACE, server).replace(NGINX_PLACE, nginx)
