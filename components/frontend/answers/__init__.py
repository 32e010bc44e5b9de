"""Answers that are kept: computed whether or not a client waits, and shown to their owner by any frontend."""
