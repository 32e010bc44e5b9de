"""`dynamo key`."""
