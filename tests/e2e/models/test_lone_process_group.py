"""PyTorch's groups in a worker without others: as gloo's would be, and without a thread that wakes up."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

PROGRAM = """
import os, tempfile, torch, torch.distributed as distributed
from dynamo_local.engine.vllm.patches.tuning import share_process_groups

share_process_groups()
threads = len(os.listdir("/proc/self/task"))
with tempfile.NamedTemporaryFile() as store:
    distributed.init_process_group("gloo", init_method="file://" + store.name, world_size=1, rank=0)
groups = [distributed.new_group([0], backend="gloo"), distributed.new_group([0], backend=distributed.get_backend())]
assert groups == [distributed.group.WORLD] * 2, groups
assert len(os.listdir("/proc/self/task")) == threads, "a group has a thread"
one, empty = torch.arange(3.0), torch.zeros(3)
for group in groups:
    assert (distributed.get_world_size(group), distributed.get_rank(group)) == (1, 0)
    distributed.barrier(group)
    distributed.broadcast(one, 0, group)
    distributed.all_reduce(one, group=group)
    distributed.all_gather([empty], one, group=group)
    assert one.tolist() == empty.tolist() == [0, 1, 2], (one, empty)
    scattered = torch.zeros(3)
    distributed.reduce_scatter_tensor(scattered, one, group=group)
    gathered = torch.zeros(3)
    distributed.all_gather_into_tensor(gathered, one, group=group)
    assert scattered.tolist() == gathered.tolist() == [0, 1, 2], (scattered, gathered)
    told, known = [{"a": 1}], [None]
    distributed.broadcast_object_list(told, 0, group)
    distributed.all_gather_object(known, {"b": 2}, group)
    assert (told, known) == ([{"a": 1}], [{"b": 2}]), (told, known)
    distributed.destroy_process_group(group)
distributed.destroy_process_group()
print("right")
"""


def test_a_lone_process_has_one_group_without_a_thread() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr
