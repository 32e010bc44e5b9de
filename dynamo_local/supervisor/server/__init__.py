"""One server: from the command line of `dynamo serve` to a plan of processes, and from its first file to its last
process.

`launch/` decides what to start; `serve.py` takes the lock and the devices;
`server.py` brings everything up, and takes it down; `machinery.py` has what runs processes on a machine, and keeps
it running; `nats/` has its bus; `reports/` tells of it. Where workers live on a cluster, `nodes.py` has what the head
has for them, and keeps the nodes in order.
"""
