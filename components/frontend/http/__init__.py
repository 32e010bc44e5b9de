"""HTTP in front of the OpenAI server, as ASGI: the gate, the reading of bodies, and what is changed in answers.

The rules by which requests are let in are in core/http/. No HTTP server and no engine is known here.
"""
