"""One server: from the command line of `dynamo serve` to a plan of processes, and from its first file to its last
process.

`launch/` decides what to start, and has `plan.py` for the processes; `serve.py` takes the lock and the devices;
`server.py` brings everything up, keeps it running, and takes it down; `reports/` tells of it.
"""
