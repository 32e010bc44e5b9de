"""Facts about the kernel."""

from __future__ import annotations

import platform
import time

from dynamo_local.core.doctor.kernel import Kernel
from dynamo_local.doctor.files import number_of, text_of


def kernel() -> Kernel:
    autogroup = number_of("/proc/sys/kernel/sched_autogroup_enabled")
    return Kernel(
        release=platform.release(),
        autogroup=None if autogroup is None else bool(autogroup),
        ptrace_scope=number_of("/proc/sys/kernel/yama/ptrace_scope"),
        clock_source=text_of("/sys/devices/system/clocksource/clocksource0/current_clocksource"),
        wall_clock_s=time.time(),
    )
