"""What is stored for clients, over HTTP."""
