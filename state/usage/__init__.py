"""Usage on disk: a journal for each frontend, and the totals into which the server folds them. They outlive the server.

    {root}/{namespace}.usage/journal.v1.{lease}.{number}.jsonl
    {root}/{namespace}.usage/totals.json

A journal belongs to one process, which locks it as long as it writes there; so a journal that can be locked has ended.
The kernel frees the lock however the process ends.
"""
