"""A client and a load generator for any OpenAI endpoint, behind `dynamo load` and the benchmarks.

Here belongs what makes a load, sends it, and says what came of it. Not here: anything about how this project serves;
the generator sees a URL and nothing else, so that servers can be compared.

For benchmarks and tests: `client.Client` asks for one completion at a time; `generator.Generator` sends many, in an
open or a closed loop. Both fill `results.records.Record`.

Pure (no I/O, no clock, random numbers passed in): arrivals, lengths, traces, workload, prompts, body, answers, records,
objectives, quantiles, figures, notes, comparison, report. The rest reads files or talks to the network: asked, results,
connection, endpoint, client, generator, session.
"""
