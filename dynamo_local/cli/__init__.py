"""The `dynamo` command: options, what is printed, exit codes.

What a command does belongs in the supervisor. Modules here import click and core at their top and everything
else where a command needs it, so that `dynamo --help` answers at once.
"""
