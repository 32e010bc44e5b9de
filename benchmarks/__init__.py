"""Measurements against stock vLLM, by commands that anybody can repeat: `python -m benchmarks` lists them.

Here belongs what starts real servers and measures them from outside, and simulations of a policy (turns). Not here:
tests of behaviour (tests/), and anything that the product imports. What was measured, and what was aimed at, is in
docs/internals/results/.

harness/ has what all share (servers.py: the servers that are measured, of this checkout and of another one); each other
folder is a family: gateway/, machine/, disaggregation/, migration/, planner/, endpoints/, faults/. A benchmark is a
module with SUMMARY, add_arguments and run, entered in __main__.py.

Machines are shared and noisy. Therefore everything is compared side by side in one run, in turns, and reported as
medians and ratios of neighbouring turns, each with the spread that the turns show.
"""
