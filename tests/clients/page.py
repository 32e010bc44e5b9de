"""The programs of docs/guides/clients.md: each is a block of code with a file name behind its language."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/guides/clients.md"
SERVER = "server.sh"
"""The block with the command that starts the server."""
SERVER_PLACE, NGINX_PLACE = "127.0.0.1:8000", "127.0.0.1:8080"
"""Where the page's programs find them."""

_BLOCK = re.compile(r"^```\w+ (\S+)\n(.*?)^```$", re.M | re.S)


def files_of(text: str) -> dict[str, str]:
    """File name -> content. Raises ValueError for a name that is there twice."""
    found: dict[str, str] = {}
    for name, content in _BLOCK.findall(text):
        if name in found:
            raise ValueError(f"two blocks are called {name}")
        found[name] = content
    return found


def server_options(command: str) -> list[str]:
    """What the page's command gives to `dynamo serve`."""
    words = shlex.split(command.replace("\\\n", " "))
    if words[:2] != ["dynamo", "serve"]:
        raise ValueError(f"not `dynamo serve`: {command}")
    return words[2:]


def moved(content: str, server: str, nginx: str) -> str:
    """A program that asks these, each HOST:PORT, instead of where the page has them."""
    return content.replace(SERVER_PLACE, server).replace(NGINX_PLACE, nginx)
