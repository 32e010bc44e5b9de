"""Live migration of requests: the gap in a stream, draining a worker, rebalancing a fleet."""
