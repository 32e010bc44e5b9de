"""`dynamo run` and `dynamo chat`: asks a model behind an OpenAI API, of a server that runs or of one started for it."""
