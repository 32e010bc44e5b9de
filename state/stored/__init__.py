"""What servers keep on disk for their clients: each store in a folder of its own, which outlives the server."""
