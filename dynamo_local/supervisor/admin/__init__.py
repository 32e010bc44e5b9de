"""What commands ask of a running server."""
