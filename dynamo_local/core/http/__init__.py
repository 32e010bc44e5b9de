"""Rules for HTTP clients: open paths, admission, bounds of requests and connections. Pure."""
