"""One request: its log, recovery, outbox, and where its prompt is prefilled. Pure."""
