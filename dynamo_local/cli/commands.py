"""The commands of `dynamo`, by groups, with the line that `dynamo --help` shows for each.

A new command is one line here: its name, its module below dynamo_local/cli, and the first paragraph of its docstring.
The module has the command under its name. It is imported when the command is used, so that every command starts fast.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """A command: its name, its module, and its purpose, which fits on a line of 80 columns beside the name."""

    name: str
    module: str
    purpose: str


GROUPS: dict[str, tuple[Entry, ...]] = {
    "Run": (
        Entry("serve", "server.serve", "Serve MODEL with workers, a router and the OpenAI API."),
        Entry("run", "requests.run", "Ask MODEL one PROMPT, or start a chat."),
        Entry("chat", "requests.run", "Chat with MODEL, or with the model of the server that runs."),
        Entry("wait", "server.wait", "Wait until a server or an endpoint is ready."),
        Entry("stop", "server.stop", "Stop a running server, or clean up after a crash."),
        Entry("batch", "jobs", "Run a file of requests; list and cancel batches."),
        Entry("task", "jobs", "List, show and cancel asynchronous tasks."),
        Entry("load", "load", "Send requests to an OpenAI endpoint and measure the answers."),
    ),
    "Look": (
        Entry("ls", "look.ls", "Show all servers of this user."),
        Entry("ps", "look.ps", "List the processes of a server, with their states and devices."),
        Entry("top", "look.top", "Show workers, requests and planner of a server live."),
        Entry("events", "look.events", "Show what has happened to a server, and why."),
        Entry("logs", "look.logs", "Print the logs of all services, or of one SERVICE."),
        Entry("describe", "look.describe", "Show everything known of a process, endpoint or live request."),
        Entry("requests", "requests.requests", "List the requests in flight, with their workers."),
        Entry("route", "look.route", "Show to which workers the latest requests went, and why."),
        Entry("usage", "look.usage", "Show what requests have used, by API key and endpoint."),
        Entry("queue", "requests.queue", "List or drop the jobs of the prefill queues."),
    ),
    "Change": (
        Entry("scale", "workers.scale", "Set the number of workers of a service or an endpoint."),
        Entry("drain", "workers.drain", "Drain and stop one worker."),
        Entry("restart", "workers.restart", "Restart a service or one worker with no failed requests."),
        Entry("role", "workers.role", "Change the ROLE of a worker to prefill or decode."),
        Entry("migrate", "requests.migrate", "Migrate running requests to another worker."),
        Entry("planner", "workers.planner", "Add and remove workers with the load, until interrupted."),
        Entry("endpoint", "endpoints.endpoint", "Create, show, change, park, wake and delete endpoints."),
        Entry("key", "keys.key", "Create, list, rotate and revoke API keys."),
        Entry("config", "server.config", "Show or change the live settings of a server."),
        Entry("rotate-token", "server.rotate_token", "Replace the token of the bus while requests run."),
    ),
    "Set up": (
        Entry("doctor", "server.doctor", "Check this machine: finding and remedy for each problem."),
        Entry("completion", "completion", "Print the script that makes SHELL complete `dynamo`."),
    ),
}
"""Groups in the order of `dynamo --help`."""

EXAMPLES = """\
Examples:
  dynamo serve Qwen/Qwen3-0.6B --workers 2
  curl http://127.0.0.1:8000/v1/models    the API, in another terminal
  dynamo top                              what each worker does
  dynamo scale VllmWorker=3               three workers
  dynamo logs -f VllmWorker               what they log
  dynamo stop
"""
