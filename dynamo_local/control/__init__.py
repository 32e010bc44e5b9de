"""The control API of a server, as all processes on its machine use it: what can be asked, and the client that asks."""
