"""Models of the Hugging Face Hub, by their id: looked up, downloaded with progress, kept in the hub's usual cache."""
