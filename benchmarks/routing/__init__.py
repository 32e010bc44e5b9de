"""Where requests go, in simulated fleets: policies side by side, by the driver in virtual time."""
