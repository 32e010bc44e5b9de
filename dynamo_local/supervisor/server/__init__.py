"""A server from its first file to its last process."""
