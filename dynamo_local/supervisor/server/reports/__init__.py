"""What a server tells of itself: logs, the event log, its progress while it comes up, and lines for the terminal."""
