"""Commands that show a server and what happens to it."""
