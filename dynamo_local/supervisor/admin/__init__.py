"""Commands that ask something of a running server, a module each. All of them reach it by `connect.py`.

What changes the workers that run belongs in the actuator; what a terminal shows belongs in the CLI.
"""
