"""When an endpoint is awake, parked or asleep. Pure."""
