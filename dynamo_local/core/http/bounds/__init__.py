"""What one client may ask for, and how refusals read: sequences, sizes, connections, the limits of keys."""
