"""The surroundings of a server: small file systems that can be filled up, and a wall clock that can be stepped."""
