"""HTTP for the load generator: connections, bodies, streamed answers."""
