"""`dynamo task`."""
