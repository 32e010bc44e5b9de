"""The paths of a namespace's files. Every path is spelled here and nowhere else.

    {root}/{namespace}.json           statefile
    {root}/{namespace}.json.lock      held for the time of one update of the statefile
    {root}/{namespace}.lock           held by the server for its whole life
    {root}/{namespace}.run/           what a running server needs; removed when it ends
    {root}/{namespace}.logs/          one file a watcher; kept
    {root}/{namespace}.endpoints.*    the registry of endpoints, its copy and backups, and their use; kept
    {root}/{namespace}.keys.*         the registry of keys, its copy and backups; kept
    {root}/{namespace}.usage/         what requests have used; kept
    {root}/{namespace}.files/         files that clients have uploaded, and outputs of batches; kept
    {root}/{namespace}.batches/       batches, with what has become of each of their lines; kept
    {root}/{namespace}.answers/       answers that are kept for their owners (`state.answers`); kept
    {root}/{namespace}.tasks/         asynchronous tasks and their results (`state.async_tasks`); kept
    {root}/{namespace}.callbacks.secret   the secret that signs their callbacks; kept

A namespace contains no dot, so no two of these names collide. Directories are 0700, files 0600.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dynamo_local.core.names import check_namespace

STATE_DIR_VARIABLE = "DYN_LOCAL_STATE_DIR"
"""Folder of statefiles, sockets and logs. By default ~/.dynamo/state."""

SOCKET_PATH_LIMIT_BYTES = 107
"""Longest path of a unix socket, by the kernel."""

KEPT = ("logs", "endpoints", "keys", "usage", "files", "batches", "answers", "tasks", "callbacks")
"""What is kept when the server ends, by the part of its name behind the namespace."""


def state_root(environ: Mapping[str, str]) -> Path:
    """Absolute directory of all statefiles: $DYN_LOCAL_STATE_DIR, or ~/.dynamo/state when unset or empty.

    A relative setting counts from the working directory; whoever starts a process with another one passes the
    absolute path on.
    """
    configured = environ.get(STATE_DIR_VARIABLE)
    if configured:
        return Path(configured).expanduser().absolute()
    home = environ.get("HOME")
    return (Path(home) if home else Path.home()).absolute() / ".dynamo" / "state"


@dataclass(frozen=True)
class StatePaths:
    """Paths of one namespace under one state root. Computing them touches no disk."""

    root: Path
    namespace: str

    def __post_init__(self) -> None:
        check_namespace(self.namespace)

    @classmethod
    def of(cls, namespace: str, environ: Mapping[str, str]) -> StatePaths:
        """Paths of the namespace under the root that the environment names."""
        return cls(state_root(environ), namespace)

    def is_kept(self, path: Path) -> bool:
        """Whether this path in the root is of the namespace, and is kept when the server ends."""
        namespace, _, rest = path.name.partition(".")
        return namespace == self.namespace and rest.partition(".")[0] in KEPT and path.suffix != ".tmp"

    @property
    def statefile(self) -> Path:
        return self.root / f"{self.namespace}.json"

    @property
    def unreadable_statefile(self) -> Path:
        """The place to which a statefile that cannot be read is moved."""
        return self.root / f"{self.namespace}.json.unreadable"

    @property
    def update_lock(self) -> Path:
        return self.root / f"{self.namespace}.json.lock"

    @property
    def server_lock(self) -> Path:
        return self.root / f"{self.namespace}.lock"

    @property
    def run_dir(self) -> Path:
        return self.root / f"{self.namespace}.run"

    @property
    def logs_dir(self) -> Path:
        return self.root / f"{self.namespace}.logs"

    @property
    def state_copy(self) -> Path:
        """A copy of the statefile, which is used if that is damaged while the server runs."""
        return self.run_dir / "state.json"

    @property
    def record_file(self) -> Path:
        """The server's record of itself (`state.record`), as JSON."""
        return self.run_dir / "server.json"

    @property
    def graph_file(self) -> Path:
        """The resolved graph, as JSON."""
        return self.run_dir / "graph.json"

    def graph_of(self, revision: str) -> Path:
        """The resolved graph of an endpoint's revision, as JSON; of the server's own graph if `revision` is empty."""
        return self.run_dir / "endpoints" / f"{revision}.json" if revision else self.graph_file

    @property
    def board_file(self) -> Path:
        """The board of endpoints (core/messages/endpoints.py), as JSON. The server writes it for its frontends and its
        planner."""
        return self.run_dir / "board.json"

    @property
    def registry_file(self) -> Path:
        """The endpoints that were ordered. Kept when the server ends."""
        return self.root / f"{self.namespace}.endpoints.json"

    @property
    def registry_copy(self) -> Path:
        """A copy of that file, which is used if the file is damaged."""
        return self.root / f"{self.namespace}.endpoints.copy.json"

    def registry_backup(self, version: int) -> Path:
        """The registry as an earlier release wrote it, from before it was converted."""
        return self.root / f"{self.namespace}.endpoints.v{version}.json"

    @property
    def endpoint_use_file(self) -> Path:
        """When endpoints with a forecast were used. Kept when the server ends."""
        return self.root / f"{self.namespace}.endpoints.use.json"

    @property
    def keys_file(self) -> Path:
        """The API keys. Kept when the server ends."""
        return self.root / f"{self.namespace}.keys.json"

    @property
    def keys_copy(self) -> Path:
        """A copy of that file, which is used if the file is damaged."""
        return self.root / f"{self.namespace}.keys.copy.json"

    def keys_backup(self, version: int) -> Path:
        """The API keys as an earlier release wrote them, from before they were converted."""
        return self.root / f"{self.namespace}.keys.v{version}.json"

    @property
    def limits_file(self) -> Path:
        """What all frontends count against the limits of keys (components/frontend/limits/places.py)."""
        return self.run_dir / "limits.1"

    @property
    def usage_dir(self) -> Path:
        """What requests have used (`state.usage`). Kept when the server ends."""
        return self.root / f"{self.namespace}.usage"

    @property
    def usage_totals(self) -> Path:
        return self.usage_dir / "totals.json"

    def usage_journal(self, lease: str, number: int | str) -> Path:
        """A journal of the frontend with this lease. The name has the version of its records."""
        return self.usage_dir / f"journal.v1.{lease}.{number}.jsonl"

    @property
    def files_dir(self) -> Path:
        """Files of clients (`state.stored.files`). Kept when the server ends."""
        return self.root / f"{self.namespace}.files"

    @property
    def batches_dir(self) -> Path:
        """Batches (`state.stored.batches`). Kept when the server ends."""
        return self.root / f"{self.namespace}.batches"

    @property
    def answers_dir(self) -> Path:
        """Answers that are kept (`state.answers`). Kept when the server ends."""
        return self.root / f"{self.namespace}.answers"

    @property
    def tasks_dir(self) -> Path:
        """Asynchronous tasks (`state.async_tasks`). Kept when the server ends."""
        return self.root / f"{self.namespace}.tasks"

    @property
    def callback_secret_file(self) -> Path:
        """The secret that signs callbacks of tasks (`state.async_tasks.secret`). Kept when the server ends."""
        return self.root / f"{self.namespace}.callbacks.secret"

    @property
    def blueprint_file(self) -> Path:
        """The blueprint of processes, as JSON. Exists while workers may be added and removed."""
        return self.run_dir / "blueprint.json"

    @property
    def decisions_file(self) -> Path:
        """The planner's decisions, a JSON object in each line."""
        return self.logs_dir / "decisions.jsonl"

    @property
    def events_file(self) -> Path:
        """The events of this and earlier servers of the namespace, a JSON object in each line."""
        return self.logs_dir / "events.jsonl"

    @property
    def bus_file(self) -> Path:
        """Address and token of the bus, as JSON."""
        return self.run_dir / "bus.json"

    @property
    def forkserver_socket(self) -> Path:
        """Socket of the fork server (process/forkserver). The path may be too long to bind by name."""
        return self.run_dir / "forkserver.sock"

    @property
    def spare_socket(self) -> Path:
        """Socket of the process that is forked for the next fork server (process/forkserver/spare.py)."""
        return self.run_dir / "spare.sock"

    @property
    def prepared_dir(self) -> Path:
        """Orders for prepared processes, and their sockets (process/forkserver/prepared). The fork server makes it."""
        return self.run_dir / "prepared"

    def prepared_socket(self, name: str) -> Path:
        """Socket of a prepared process, by its key; or the link to it, by the first watcher of its workers."""
        return self.prepared_dir / f"{name}.sock"

    @property
    def sockets_link(self) -> Path:
        """Link to the directory of the sockets, if that is elsewhere. Made before that directory, removed after it."""
        return self.run_dir / "sockets"

    @property
    def nats_dir(self) -> Path:
        return self.run_dir / "nats"

    @property
    def nats_config(self) -> Path:
        return self.nats_dir / "nats.conf"

    @property
    def nats_tls(self) -> tuple[Path, Path]:
        """Certificate and key of NATS, if it speaks TLS."""
        return self.nats_dir / "tls.crt", self.nats_dir / "tls.key"

    @property
    def circus_config(self) -> Path:
        return self.run_dir / "circus.ini"

    def log_file(self, watcher: str) -> Path:
        return self.logs_dir / f"{watcher}.log"


_UUID_LENGTH = 36
_PID_LENGTH = 7


@dataclass(frozen=True)
class Sockets:
    """circusd's unix sockets, all in one 0700 directory, which also has a folder for the sockets and temporary
    files of each process of a service. Made by `state.files.make_sockets`, removed with the run directory."""

    directory: Path

    @property
    def circus(self) -> Path:
        """Socket for commands."""
        return self.directory / "circus.sock"

    @property
    def circus_pubsub(self) -> Path:
        """Socket for events."""
        return self.directory / "circus.pub"

    @property
    def control(self) -> Path:
        """Socket of the control API (dynamo_local/control)."""
        return self.directory / "control.sock"

    @property
    def circus_endpoint(self) -> str:
        return f"ipc://{self.circus}"

    @property
    def circus_pubsub_endpoint(self) -> str:
        return f"ipc://{self.circus_pubsub}"

    def process_folder(self, pid: int) -> Path:
        """Folder for the sockets and temporary files of one process. See `state.remains`."""
        return self.directory / str(pid)

    @property
    def fit(self) -> bool:
        """Whether all paths are short enough for sockets, including those that vLLM names by a UUID in a process's
        folder."""
        longest = len(bytes(self.directory)) + 1 + _PID_LENGTH + 1 + _UUID_LENGTH
        return longest <= SOCKET_PATH_LIMIT_BYTES

    @classmethod
    def of_endpoint(cls, circus_endpoint: str) -> Sockets:
        """The sockets in the directory of the one that a statefile names."""
        return cls(Path(circus_endpoint.removeprefix("ipc://")).parent)
