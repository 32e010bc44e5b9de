"""Devices: which this machine has, which process gets which of them, and who holds them across servers and users."""
