"""All checks in their order."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dynamo_local.core.doctor.endpoints import check_endpoints
from dynamo_local.core.doctor.finding import Finding
from dynamo_local.core.doctor.gpus import check_gpus
from dynamo_local.core.doctor.hub import check_hub
from dynamo_local.core.doctor.kernel import check_kernel
from dynamo_local.core.doctor.machine import check_machine
from dynamo_local.core.doctor.network import check_network
from dynamo_local.core.doctor.servers import check_servers
from dynamo_local.core.doctor.software import check_software, vllm_build
from dynamo_local.core.doctor.storage import check_storage
from dynamo_local.doctor.endpoints import endpoints
from dynamo_local.doctor.gpus import gpus
from dynamo_local.doctor.hub import hub
from dynamo_local.doctor.kernel import kernel
from dynamo_local.doctor.machine import machine
from dynamo_local.doctor.network import network
from dynamo_local.doctor.servers import server_processes, servers
from dynamo_local.doctor.software import software
from dynamo_local.doctor.storage import storage


def examine(root: Path, cache: Path, host: str, port: int, environ: Mapping[str, str]) -> list[Finding]:
    """`root`: the state folder. `cache`: our folder of models. `host` and `port`: the default ones of the API."""
    installed = software()
    accelerators = gpus(vllm_build(installed.versions), installed.torch_cuda, server_processes(root))
    return [
        *check_software(installed),
        *check_machine(machine(bool(accelerators.devices))),
        *check_kernel(kernel()),
        *check_gpus(accelerators),
        *check_storage(storage(root, cache)),
        *check_network(network(host, port, environ)),
        *check_hub(hub(environ)),
        *check_servers(servers(root)),
        *check_endpoints(endpoints(root)),
    ]
