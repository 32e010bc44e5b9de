"""One request: its log, its recovery, what workers keep of it, and where its prompt is prefilled. Pure."""
