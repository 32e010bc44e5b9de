"""Known faults and settings of the Linux kernel that matter, and the clock."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from dynamo_local.core.doctor.finding import Finding, fail, ok, warn

_FAULT_FROM, _FAULT_BEFORE = (6, 13, 0), (6, 18, 45)
"""Kernels with the scheduling fault of docs/internals/cores.md: since "sched/fair: Fix EEVDF entity placement bug
causing scheduling lag" (6d71a9c61604), which 6.18.45 reverts (https://github.com/ejc3/fcvm/pull/940)."""

_SLOW_CLOCKS = ("hpet", "acpi_pm", "jiffies", "pit")
_BUILT_S = 1735689600.0
"""The beginning of 2025. This program is younger."""

_RELEASE = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?")


@dataclass(frozen=True)
class Kernel:
    """`release`: as uname tells it. `autogroup`: whether Linux shares cores among sessions. `ptrace_scope`: Yama's
    setting; None without Yama. `clock_source`: the kernel's. `wall_clock_s`: seconds since 1970."""

    release: str
    autogroup: bool | None
    ptrace_scope: int | None
    clock_source: str | None
    wall_clock_s: float


def check_kernel(facts: Kernel) -> Iterator[Finding]:
    yield _scheduling(facts)
    yield _ptrace(facts)
    yield _clock(facts)


def _scheduling(facts: Kernel) -> Finding:
    match = _RELEASE.match(facts.release)
    found = f"Linux {facts.release}"
    if match is None:
        return ok("kernel", found)
    version = (int(match[1]), int(match[2]), int(match[3] or 0))
    if _FAULT_FROM <= version < _FAULT_BEFORE and facts.autogroup is not False:
        return warn(
            "kernel",
            f"{found} can keep other programs from the cores of a session or container whose processes wake up often",
            "use Linux 6.18.45 or newer (docs/internals/cores.md)",
        )
    return ok("kernel", found)


def _ptrace(facts: Kernel) -> Finding:
    scope = facts.ptrace_scope
    if scope is None:
        return ok("ptrace", "no Yama: processes of one user may read each other's memory, as KV transfer on CPUs does")
    if scope <= 1:
        return ok("ptrace", f"kernel.yama.ptrace_scope is {scope}: workers on CPUs can lend each other KV")
    return warn(
        "ptrace",
        f"kernel.yama.ptrace_scope is {scope}: workers on CPUs cannot lend each other KV, and compute it again",
        "`sysctl kernel.yama.ptrace_scope=1` (docs/security.md)",
    )


def _clock(facts: Kernel) -> Finding:
    if facts.wall_clock_s < _BUILT_S:
        return fail("clock", "the clock is years behind: TLS certificates look invalid", "set the clock")
    if facts.clock_source in _SLOW_CLOCKS:
        return warn(
            "clock",
            f"the clock source {facts.clock_source} is slow to read",
            "use tsc or kvm-clock, if the machine can",
        )
    return ok("clock", f"clock source {facts.clock_source or 'not known'}")
