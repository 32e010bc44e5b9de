"""The NATS of a server: its process, its certificate, its token, and what it keeps for the server."""
