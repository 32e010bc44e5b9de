"""What `dynamo serve MODEL` decides: the graph, the engine's arguments, the parsers; and how it shows that."""
