"""The devices that workers of endpoints can have: those of this machine, or of the nodes of a cluster."""
