"""All checks in their order."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dynamo_local.control.answers import Finding
from dynamo_local.doctor.gpus import check_gpus, find_gpus
from dynamo_local.doctor.machine import check_kernel, check_machine
from dynamo_local.doctor.network import check_hub, check_network
from dynamo_local.doctor.servers import check_endpoints, check_servers, server_processes, told_by_servers
from dynamo_local.doctor.software import check_software, installed_versions, torch_cuda, vllm_build
from dynamo_local.doctor.storage import check_storage


def examine(root: Path, cache: Path, host: str, port: int, environ: Mapping[str, str]) -> list[Finding]:
    """`root`: the state folder. `cache`: our folder of models. `host` and `port`: the default ones of the API."""
    versions, cuda = installed_versions(), torch_cuda()
    told = told_by_servers(root)
    gpus = find_gpus(server_processes(root))
    return [
        *check_software(versions, cuda),
        *check_machine(bool(gpus.devices)),
        *check_kernel(),
        *check_gpus(gpus, vllm_build(versions), cuda),
        *check_storage(root, cache),
        *check_network(host, port, environ),
        *check_hub(environ),
        *check_servers(root, told),
        *check_endpoints(root, told),
    ]
