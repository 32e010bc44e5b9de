"""The statefile: its contents, their transitions, the file itself, and its comparison with what runs."""
