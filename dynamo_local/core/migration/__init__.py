"""Live migration: the protocol, reservations, migrations in flight, rebalancing. Pure."""
