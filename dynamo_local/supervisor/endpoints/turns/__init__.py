"""Turns of endpoints on the server's devices, carried out. The policy is core/endpoints/turns."""
