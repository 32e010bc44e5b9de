"""The `dynamo` command: options, output, exit codes. The work of a command is done in the supervisor.

Modules here import click and core at the top, and everything else inside the commands, so that `dynamo --help` is fast.
"""
