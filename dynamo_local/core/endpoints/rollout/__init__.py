"""What is done next for one endpoint, by what is ordered of it and what is observed. Pure."""
