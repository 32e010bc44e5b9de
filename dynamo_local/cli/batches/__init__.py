"""`dynamo batch`."""
