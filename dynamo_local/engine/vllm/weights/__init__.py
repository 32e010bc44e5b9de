"""Weights that workers share: loaded once, in a process from which workers are forked (process/forkserver/prepared).

key.py        what weights depend on, and which ones are not shared
prepared.py   loads them in a prepared process, has an engine use them, and orders such a process
"""
