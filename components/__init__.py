"""The services of a serving graph: frontend, router, workers. Each is a class that `dynamo serve` runs as a process.

What belongs here joins the adapters below (bus, engines, OpenAI server) to one duty; decisions are in
`dynamo_local.core`. Importing a component imports neither vLLM nor torch: they come with the process that needs them.
"""
