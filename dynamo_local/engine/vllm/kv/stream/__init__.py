"""KV of other machines on a TLS stream of our own: an agent in NIXL's place, whose source writes what is asked for."""
