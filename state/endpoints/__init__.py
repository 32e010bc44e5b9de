"""What servers keep on disk of endpoints: the registry of what is ordered, and the board of what is served."""
