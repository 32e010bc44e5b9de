"""What the bus keeps, in JetStream: the prefill queue, the live settings, and who owns the namespace."""
