"""What is stored for clients: files, their bounds, and how requests and answers about them read."""
