"""The control API as the server answers it."""
