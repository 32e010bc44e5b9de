"""The frontend service: vLLM's OpenAI server, and the live requests behind it.

service, settings       the service, and what can be set
limits/                 what all frontends of a server count together
metrics                 /metrics of all of them
http/                   the gate before the OpenAI server
request_context         what is known of an HTTP request, all the way to the dispatcher
endpoints/              the models that are served
dispatcher, worker_link from the OpenAI server to workers, and tokens back
requests/               the live requests
placing                 which worker a request gets
prefill                 prompts that prefill workers compute
migration/              requests that move while they run
admin                   what operators ask
"""
