"""The fleet as routers and frontends see it: who is there, how loaded, who gets a request. Pure."""
