"""HTTP before the OpenAI server, as ASGI: which paths are open, how bodies are read, what answers look like.

What is decided here is how; whether a request is let in is the gate's (http_gate.py) and core/admission.py's. No HTTP
server and no engine is known here.
"""
