"""A client and a load generator for any OpenAI endpoint, behind `dynamo load` and the benchmarks.

The package plans a load, sends it, and evaluates the answers. It knows nothing but a URL of the server, so that servers
can be compared.

For benchmarks and tests: `client.Client` requests one completion at a time; `generator.Generator` sends many, in an
open or a closed loop. Both fill `results.records.Record`.

Pure (no I/O, no clock, random numbers passed in): arrivals, lengths, traces, workload, prompts, body, answers, records,
objectives, quantiles, figures, notes, comparison, report. The others read files or use the network: asked, file,
connection, endpoint, client, generator, session.
"""
