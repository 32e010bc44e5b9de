"""`dynamo endpoint`: the models that a server serves beside each other."""
