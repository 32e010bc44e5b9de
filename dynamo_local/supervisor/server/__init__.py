"""One server: from the command line of `dynamo serve` to a plan of processes, and from its first file to its last
process.

`launch.py` decides what to start, with the plans of `plan.py`; `serve.py` takes the lock and the devices; `server.py`
brings everything up, keeps it running, and takes it down.
"""
