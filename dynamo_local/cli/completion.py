"""`dynamo completion`."""

from __future__ import annotations

import click

# The name that click derives from the program's: set by the script when the shell asks for completions. click answers
# then, in place of the command.
ASKED_BY = "_DYNAMO_COMPLETE"


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the script that makes SHELL complete `dynamo`.

    \b
    bash   echo 'eval "$(dynamo completion bash)"' >> ~/.bashrc
    zsh    echo 'eval "$(dynamo completion zsh)"' >> ~/.zshrc     (after compinit)
    fish   dynamo completion fish > ~/.config/fish/completions/dynamo.fish

    Commands, options, files, namespaces, watchers, services, live settings, requests and models are completed. It holds
    for shells that are started afterwards. bash has to be 4.4 or newer.

    \b
    dynamo completion bash
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None, "click knows the shells of the choice"
    # Not `source`, which for bash starts a shell to look at its version.
    script = kind(context.find_root().command, {}, "dynamo", ASKED_BY)
    click.echo(script.source_template % script.source_vars())
