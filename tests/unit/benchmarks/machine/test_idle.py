"""What the benchmark of an idle server makes of /proc."""

from __future__ import annotations

import os
import threading

from benchmarks.harness.accounting import Process
from benchmarks.machine.idle import Rate, _by_process, _names
from benchmarks.machine.thread_times import Thread, parse_times, read_threads

STATUS = "Name:\tgloo tcp: loop\nState:\tS\nvoluntary_ctxt_switches:\t120\nnonvoluntary_ctxt_switches:\t3\n"


def test_a_threads_times_are_read_from_its_lines() -> None:
    times = parse_times(STATUS, "2500000 17 44\n", 5.0)
    assert (times.name, times.cpu_ns, times.switches, times.at) == ("gloo tcp: loop", 2_500_000, 123, 5.0)


def test_all_threads_are_found_and_those_of_processes_that_are_gone_are_left_out() -> None:
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    found = read_threads([os.getpid(), 2**22 + 1])
    ended.set()
    thread.join()
    assert Thread(os.getpid(), thread.native_id or 0) in found


def test_processes_of_one_kind_are_told_apart_and_summed_by_their_own_threads() -> None:
    processes = [Process(1, 0.0, "Worker"), Process(2, 0.0, "nats"), Process(3, 0.0, "Worker")]
    assert _names(processes) == {1: "Worker", 2: "nats", 3: "Worker #2"}
    threads = [Rate("nats", "a", 1.0, 10.0), Rate("Worker", "b", 4.0, 1.0), Rate("nats", "c", 2.0, 20.0)]
    assert _by_process(threads) == [Rate("Worker", "all", 4.0, 1.0), Rate("nats", "all", 3.0, 30.0)]
