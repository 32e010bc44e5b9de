"""The API keys of a server: orders about them are checked and written down before they are answered."""
