"""HTTP before the OpenAI server, as ASGI: which paths are open, how bodies are read, what answers look like.

Whether a request is let in is decided by the gate (gate.py) and core/http/admission.py's. No HTTP
server and no engine is known here.
"""
