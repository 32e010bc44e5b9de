"""Serving a language model: graphs of the components, and a configuration for each."""
