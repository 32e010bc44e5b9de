"""Asynchronous tasks, for their owners alone. They outlive stop, reboot and upgrade.

    {root}/{namespace}.tasks/store.json                   the version (state/stored/folder.py)
    {root}/{namespace}.tasks/of-{owner}/{task}.running    locked by the frontend that has it in hand, if one does
    {root}/{namespace}.tasks/of-{owner}/{task}.cancel     empty: whoever has it is to end it
    {root}/{namespace}.tasks/of-{owner}/{task}.ended      it does not change any more

Each is a journal, as answers have them (state/answers), with the records of core/async_tasks/records.py.
"""
