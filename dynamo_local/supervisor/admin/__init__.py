"""What a running server answers about itself, a module for each kind of question; `handlers.py` has them all. Beside
them what commands learn, and order, without one: `servers.py`.

What changes the workers that run belongs in the actuator; what a terminal shows belongs in the CLI.
"""
