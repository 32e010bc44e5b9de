"""A client and a load generator for any OpenAI endpoint, behind `dynamo load` and the benchmarks.

The package plans a load, sends it, and evaluates the answers. It knows nothing but a URL of the server, so that servers
can be compared.

    asked        the options of `dynamo load`, as settings
    workload     planned requests, and their prompts
    connection   HTTP
    client       an OpenAI API: its answers, and a client of one model
    session      sends a load
    figures      the record of each request, and what follows from them
    runs         what is saved, reported and compared

For benchmarks and tests: `client.Client` requests one completion at a time; `session.Generator` sends many, in an
open or a closed loop. Both fill `figures.Record`.
"""
