"""Known faults and settings of the Linux kernel that matter, and the clock."""

from __future__ import annotations

import platform
import re
import time
from collections.abc import Iterator

from dynamo_local.control.answers import Finding, fail, ok, warn
from dynamo_local.doctor.files import number_of, text_of

_FAULT_FROM, _FAULT_BEFORE = (6, 13, 0), (6, 18, 45)
"""Kernels with the scheduling fault of docs/internals/cores.md: since "sched/fair: Fix EEVDF entity placement bug
causing scheduling lag" (6d71a9c61604), which 6.18.45 reverts (https://github.com/ejc3/fcvm/pull/940)."""

_SLOW_CLOCKS = ("hpet", "acpi_pm", "jiffies", "pit")
_BUILT_S = 1735689600.0
"""The beginning of 2025. This program is younger."""

_RELEASE = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?")


def check_kernel() -> Iterator[Finding]:
    yield scheduling(platform.release(), number_of("/proc/sys/kernel/sched_autogroup_enabled"))
    yield ptrace(number_of("/proc/sys/kernel/yama/ptrace_scope"))
    yield clock(text_of("/sys/devices/system/clocksource/clocksource0/current_clocksource"), time.time())


def scheduling(release: str, autogroup: int | None) -> Finding:
    """`release`: as uname tells it. `autogroup`: 0 if Linux does not share cores among sessions."""
    match = _RELEASE.match(release)
    found = f"Linux {release}"
    if match is None:
        return ok("kernel", found)
    version = (int(match[1]), int(match[2]), int(match[3] or 0))
    if _FAULT_FROM <= version < _FAULT_BEFORE and autogroup != 0:
        return warn(
            "kernel",
            f"{found} can keep other programs from the cores of a session or container whose processes wake up often",
            "use Linux 6.18.45 or newer (docs/internals/cores.md)",
        )
    return ok("kernel", found)


def ptrace(scope: int | None) -> Finding:
    """`scope`: Yama's setting; None without Yama."""
    if scope is None:
        return ok("ptrace", "no Yama: processes of one user may read each other's memory, as KV transfer on CPUs does")
    if scope <= 1:
        return ok("ptrace", f"kernel.yama.ptrace_scope is {scope}: workers on CPUs can lend each other KV")
    return warn(
        "ptrace",
        f"kernel.yama.ptrace_scope is {scope}: workers on CPUs cannot lend each other KV, and compute it again",
        "`sysctl kernel.yama.ptrace_scope=1` (docs/security.md)",
    )


def clock(source: str | None, wall_clock_s: float) -> Finding:
    """`source`: the kernel's clock source. `wall_clock_s`: seconds since 1970."""
    if wall_clock_s < _BUILT_S:
        return fail("clock", "the clock is years behind: TLS certificates look invalid", "set the clock")
    if source in _SLOW_CLOCKS:
        return warn("clock", f"the clock source {source} is slow to read", "use tsc or kvm-clock, if the machine can")
    return ok("clock", f"clock source {source or 'not known'}")
