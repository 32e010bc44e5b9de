"""The subjects of the bus, each spelled once.

A subject is `dyn.{namespace}.{kind}...`, or, among the processes that serve a revision of an endpoint,
`dyn.{namespace}.endpoint.{revision}.{kind}...`. Namespaces, revisions and service names contain no dot, so that a
subject can be split.
"""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_local.core.fleet.view import FRONTEND_ROLE

_FRONTEND, _OTHER = "frontend", "other"
"""Kinds of processes, by whose presences subjects can be told apart. Workers hear frontends alone: were each of them
to hear all others, the messages of a fleet would grow with its square."""


OWNERS_BUCKET = "dyn_owners"
"""Name of the JetStream key-value bucket with the owner of each namespace."""


def revision_in(subject: str) -> str:
    """The text of the revision whose processes talk on a subject; empty for a subject of the whole server."""
    parts = subject.split(".", 4)
    return parts[3] if len(parts) > 4 and parts[2] == "endpoint" else ""


@dataclass(frozen=True)
class Subjects:
    """The NATS subjects of one namespace, and the names of its streams. `lease` names the process that listens.

    `revision`: text of an endpoint's revision whose processes talk among themselves; empty for processes that serve no
    model of their own. What concerns the whole server (events, devices, settings, the planner) has one subject for all
    of them.
    """

    namespace: str
    revision: str = ""

    @property
    def _server(self) -> str:
        return f"dyn.{self.namespace}"

    @property
    def _root(self) -> str:
        return f"{self._server}.endpoint.{self.revision}" if self.revision else self._server

    def presence(self, watcher: str, role: str) -> str:
        """The presence of one watcher's process. Those of frontends, whose role never changes, can be heard alone."""
        return f"{self._root}.presence.{_FRONTEND if role == FRONTEND_ROLE else _OTHER}.{watcher}"

    @property
    def presences(self) -> str:
        """Matches the presences of all processes."""
        return f"{self._root}.presence.*.*"

    @property
    def presences_of_frontends(self) -> str:
        """Matches the presences of frontends."""
        return f"{self._root}.presence.{_FRONTEND}.*"

    @property
    def presences_of_workers(self) -> str:
        """Matches the presences of the workers of all revisions. Frontends announce themselves in each revision that
        they serve as well, and are not among them."""
        return f"{self._server}.endpoint.*.presence.{_OTHER}.*"

    @property
    def presences_in_revisions(self) -> str:
        """Matches the presences of frontends in all revisions that they serve."""
        return f"{self._server}.endpoint.*.presence.{_FRONTEND}.*"

    @property
    def probe(self) -> str:
        """Tells the processes of this revision to publish their presence at once; without one, all processes."""
        return f"{self._root}.probe"

    @property
    def probe_of_frontends(self) -> str:
        """Tells the frontends of this revision, or of the server, to publish their presence at once."""
        return f"{self._root}.probe.{_FRONTEND}"

    @property
    def probe_of_all(self) -> str:
        """Tells all processes, those of endpoints included, to publish their presence at once."""
        return f"{self._server}.probe"

    @property
    def revoked(self) -> str:
        """Tells all processes of a lease that is void."""
        return f"{self._root}.revoked"

    @property
    def lost(self) -> str:
        """Tells workers of a lease that a frontend has found silent."""
        return f"{self._root}.lost"

    @property
    def revoked_of_endpoints(self) -> str:
        """Matches `revoked` of all revisions of all endpoints."""
        return f"{self._server}.endpoint.*.revoked"

    @property
    def endpoint_changes(self) -> str:
        """Tells the planner what the server has done by itself: endpoints that park, sleep, wake and swap devices, as
        events (core/messages/reports.py)."""
        return f"{self._server}.endpoint_changes"

    @property
    def address_changes(self) -> str:
        """Tells all processes to read the address of NATS anew (request; each answers)."""
        return f"{self._server}.address"

    @property
    def board(self) -> str:
        """Tells frontends and the planner that the board of endpoints has changed."""
        return f"{self._server}.board"

    def work(self, lease: str) -> str:
        """From frontends to a worker: submissions, acknowledgements, cancellations."""
        return f"{self._root}.work.{lease}"

    def tokens(self, lease: str) -> str:
        """From workers to a frontend: tokens."""
        return f"{self._root}.tokens.{lease}"

    @property
    def assign(self) -> str:
        """Asks the router for a worker (request and answer)."""
        return f"{self._root}.router.assign"

    @property
    def account(self) -> str:
        """Tells routers what becomes of the load that a frontend puts on workers."""
        return f"{self._root}.router.account"

    def routes(self, lease: str) -> str:
        """Asks a router for its latest assignments (request and answer)."""
        return f"{self._root}.router.routes.{lease}"

    def kv_events(self, lease: str) -> str:
        """What has become of a worker's cached blocks (core/messages/kv.py)."""
        return f"{self._root}.kv_events.{lease}"

    @property
    def kv_events_of_all(self) -> str:
        """Matches `kv_events` of all workers."""
        return f"{self._root}.kv_events.*"

    def kv_state(self, lease: str) -> str:
        """Asks a worker to publish all its cached blocks, on `kv_events`."""
        return f"{self._root}.kv_state.{lease}"

    def cached(self, lease: str) -> str:
        """Asks a worker how much of a prompt it has cached (request and answer)."""
        return f"{self._root}.cached.{lease}"

    def pin(self, lease: str) -> str:
        """Asks a worker to pin blocks for a reader (request and answer)."""
        return f"{self._root}.pin.{lease}"

    def confirm(self, lease: str) -> str:
        """Asks a worker whether a pin of a reader on another machine is still held (request and answer)."""
        return f"{self._root}.confirm.{lease}"

    def hot_prefixes(self, lease: str) -> str:
        """Asks a worker for the prefixes that it was asked for most (request and answer)."""
        return f"{self._root}.hot_prefixes.{lease}"

    def role(self, lease: str) -> str:
        """Tells a worker to change its role (request and answer)."""
        return f"{self._root}.role.{lease}"

    def parking(self, lease: str) -> str:
        """Tells a worker to park, or to take requests again (request and answer)."""
        return f"{self._root}.parking.{lease}"

    def node(self, node: str) -> str:
        """Orders and questions to the node server of a node (supervisor/places/far.py; request and answer)."""
        return f"{self._server}.node.{node}"

    @property
    def head(self) -> str:
        """Tells node servers that the server lives."""
        return f"{self._server}.head"

    @property
    def planner(self) -> str:
        """The planner's reports."""
        return f"{self._server}.planner"

    @property
    def events(self) -> str:
        """Events (core/messages/reports.py) of processes other than the server, which writes them down."""
        return f"{self._server}.events"

    @property
    def request_news(self) -> str:
        """What happens to the requests of frontends (core/messages/reports.py)."""
        return f"{self._server}.request_news"

    def migrations(self, lease: str) -> str:
        """Tells a worker to prepare a migration to it (request and answer)."""
        return f"{self._root}.migrations.{lease}"

    def requests(self, lease: str) -> str:
        """Asks a frontend for its requests, or to migrate some (request and answer)."""
        return f"{self._root}.requests.{lease}"

    def metrics(self, lease: str) -> str:
        """Asks a frontend for its metrics (request and answer)."""
        return f"{self._server}.metrics.{lease}"

    def claims(self, lease: str) -> str:
        """Asks a frontend for the request of a prefill job (request and answer)."""
        return f"{self._root}.claims.{lease}"

    def prefill_jobs(self, priority_class: str) -> str:
        """The subject of prefill jobs of a priority class, which the prefill stream stores."""
        return f"{self._root}.prefill.jobs.{priority_class}"

    @property
    def all_prefill_jobs(self) -> str:
        """Matches the subjects of prefill jobs of all classes."""
        return self.prefill_jobs("*")

    @property
    def prefill_stream(self) -> str:
        """Name of the JetStream stream behind the prefill queue. (Such names contain no dots.)"""
        return "_".join(part for part in ("dyn", self.namespace, self.revision, "prefill") if part)

    @property
    def settings_bucket(self) -> str:
        """Name of the JetStream key-value bucket with the live settings."""
        return f"dyn_{self.namespace}_settings"

    @property
    def setting_changes(self) -> str:
        """Matches the subjects on which NATS publishes changes in that bucket; `>` stands for the setting's name."""
        return f"{self._server}.settings.>"

    def call(self, service: str, endpoint: str) -> str:
        """Begins a call of a service's endpoint. The instances of the service form a queue group."""
        return f"{self._root}.call.{service}.{endpoint}"

    def call_control(self, call_id: str) -> str:
        """From a caller to the instance that serves its call: credit, hang-up."""
        return f"{self._root}.callctl.{call_id}"
