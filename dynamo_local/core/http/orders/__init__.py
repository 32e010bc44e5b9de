"""REST requests about endpoints and keys as orders to the server."""
