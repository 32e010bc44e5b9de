"""Ray as the cluster that a graph's workers live on (supervisor/places/cluster.py): an extra, imported only where used.

    cluster.py      the cluster as a server sees it: Ray's calls, in threads and with deadlines
    connection.py   joins a cluster that is there
    groups.py       reservations are placement groups
    placing.py      which node a reservation is made on. Pure
    agents.py       node servers are children of detached actors

Ray is asked about membership, reservations, births and deaths. No request or token goes through it.
"""
