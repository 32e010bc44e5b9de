"""Many endpoints on one server: what they cost, how they are scaled, and what they survive."""
