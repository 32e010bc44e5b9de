"""Rules for HTTP clients: open paths, models, bounds, orders, and what waits for a worker. Pure."""
