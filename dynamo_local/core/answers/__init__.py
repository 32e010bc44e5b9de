"""Answers that are kept: the records of their journals, their states, and how one goes on after a restart. Pure."""
