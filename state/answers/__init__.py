"""Answers that are kept, for their owners alone. They outlive stop, reboot and upgrade.

    {root}/{namespace}.answers/store.json                     the version (state/stored/folder.py)
    {root}/{namespace}.answers/of-{owner}/{answer}.new        being created
    {root}/{namespace}.answers/of-{owner}/{answer}.running    locked by the frontend that computes it
    {root}/{namespace}.answers/of-{owner}/{answer}.cancel     empty: whoever computes it is to end it
    {root}/{namespace}.answers/of-{owner}/{answer}.ended      it does not change any more

Each is a journal (core/answers/records.py). The lock is the kernel's: it ends with its holder.
"""
