"""The fleet as routers and frontends see it: which processes are alive, their load, and who gets a request. Pure."""
