"""Prepared processes: forks of the fork server that have loaded a model's weights, and are forked for its workers.

    worker's host ── order (a file) ──► fork server ── fork ──► prepared process, one for each set of weights
                                                                    │ listens, once the weights are loaded
    launcher ─────────────── protocol of the fork server ───────────┘ fork ──► the service's process

    orders.py     the files in the run directory that say which are wanted, and for which workers
    manager.py    makes and ends prepared processes, in the fork server
    process.py    the life of a prepared process

Pages of a forked process are private: what one worker writes, no other one sees. They share the weights since nobody
writes to them. Nothing depends on a prepared process: without one, the fork server forks a worker, which loads the
weights itself.
"""
