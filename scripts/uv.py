"""Run the uv of a virtual environment with the package indexes that pip is configured for.

uv reads neither pip's configuration files nor the PIP_ variables. They are translated here, so that a machine where
pip works (behind a mirror or a proxy, from a folder of wheels) needs no second configuration. Standard library only.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TORCH_FROM_PYTORCH = "--torch-backend=cpu"
"""Makes uv ask PyTorch's own index for torch, and for nothing else of our locks."""

# `pip config list` knows neither the defaults nor which section wins; pip's parser does.
_PRINT_PIPS_OPTIONS = """
import json
from pip._internal.commands import create_command
options, _ = create_command("install").parse_args([])
print(json.dumps(vars(options), default=str))
"""
_MISDIRECTING = ("PYTHON", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_USER", "PIP_DRY_RUN")


class SetupError(Exception):
    """The set-up cannot go on. One line: what is wrong, and what to do."""


def plain_environ() -> dict[str, str]:
    """The environment without variables that make pip or Python work on another folder than asked."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_MISDIRECTING)}


def pip_options(venv: Path) -> dict[str, Any]:
    """The options of `pip install`, from pip's configuration files, the PIP_ variables and pip's defaults."""
    command = [str(venv / "bin" / "python"), "-I", "-c", _PRINT_PIPS_OPTIONS]
    done = subprocess.run(command, env=plain_environ(), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = (done.stderr.strip() or "no output").splitlines()[-1]
        raise SetupError(f"pip's configuration cannot be read ({last}); see `{venv}/bin/pip config debug`")
    options: dict[str, Any] = json.loads(done.stdout)
    return options


def translated(pip: Mapping[str, Any]) -> dict[str, str]:
    """uv's variables for options of pip.

    pip takes the best version from all indexes. uv does so as an "unsafe" strategy; what is installed is safe by its
    hashes. Where several indexes have a version, uv takes the file of the first one and refuses another hash. So the
    main index comes first, and the last of the others stands as uv's "default", which uv asks last.
    """
    indexes: list[str] = [pip["index_url"], *pip["extra_index_urls"]]
    variables = {
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_INDEX": " ".join(indexes[:-1]),
        "UV_DEFAULT_INDEX": indexes[-1],
        "UV_FIND_LINKS": ",".join(pip["find_links"]),
        "UV_INSECURE_HOST": " ".join(pip["trusted_hosts"]),
        "UV_HTTP_RETRIES": str(pip["retries"]),
        "UV_HTTP_TIMEOUT": str(max(60, int(pip["timeout"]))),
        "SSL_CERT_FILE": pip["cert"],
        "SSL_CLIENT_CERT": pip["client_cert"],
        "ALL_PROXY": pip["proxy"],
    }
    return {name: value for name, value in variables.items() if value}


class Uv:
    """The uv in a virtual environment. Variables that are set already go before what pip's configuration says."""

    def __init__(self, venv: Path) -> None:
        self._program = venv / "bin" / "uv"
        options = pip_options(venv)
        # Options where a variable does not exist (UV_NO_INDEX) or does not win (VIRTUAL_ENV over UV_SYSTEM_PYTHON).
        self._options = (f"--python={venv / 'bin' / 'python'}", *(("--no-index",) if options["no_index"] else ()))
        # uv gives a file one minute to compile, which a busy machine may need.
        self._environ = {"UV_COMPILE_BYTECODE_TIMEOUT": "600", **translated(options), **plain_environ()}

    def pip(self, command: str, *arguments: str | Path, requirements: str = "", quiet: bool = False) -> bool:
        """Run `uv pip COMMAND`, with `requirements` as standard input; uv itself says what fails. False if it does."""
        words = [str(word) for word in (self._program, "pip", command, *self._options, *arguments)]
        output = subprocess.DEVNULL if quiet else None
        done = subprocess.run(
            words, input=requirements, env=self._environ, stdout=output, stderr=output, text=True, check=False
        )
        return done.returncode == 0

    def cache(self) -> Path:
        """The folder where uv keeps what it has fetched, for every checkout of the user."""
        command = [str(self._program), "cache", "dir"]
        return Path(
            subprocess.run(command, env=self._environ, capture_output=True, text=True, check=True).stdout.strip()
        )

    def torch_options(self, torch: str) -> tuple[str, ...]:
        """What `pip` needs to find this build of torch, e.g. `torch==2.13.0+cpu`.

        PyPI does not have CPU builds. pip's own indexes and folders are asked first: a mirror or a folder may have it.
        """
        known = self.pip("install", "--dry-run", "--no-deps", "-r", "-", requirements=torch, quiet=True)
        return () if known else (TORCH_FROM_PYTORCH,)
