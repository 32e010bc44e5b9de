"""Configuration: keys, sections, layers, and the resolved graph."""
