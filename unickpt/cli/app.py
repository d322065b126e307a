"""The commands of `unickpt`, a module for each. Nothing here imports a framework."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import unickpt
from unickpt import doors
from unickpt.cli import clean, convert, diff, inspect, ls, presets, prune, verify
from unickpt.errors import RuleWarning, UnickptError
from unickpt.tools.terminal.output import drop_output, fail, warn


class _CommandGroup(TyperGroup):
    """Prints the library's errors as messages, without a traceback; has the commands of plug-ins,
    and imports each when it is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        plugins = (*doors.ours("commands"), *doors.other_packages("commands"))
        return [*super().list_commands(ctx), *plugins]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        door = None if command is not None else doors.find("commands", cmd_name)
        return command if door is None else typer.main.get_command(door.open())

    def make_context(self, *args: Any, **options: Any) -> Any:
        try:
            return super().make_context(*args, **options)
        except UnickptError as error:  # its help names the commands of plug-ins
            fail(str(error))
        except BrokenPipeError:  # while it prints its help
            drop_output()
            raise typer.Exit from None

    def invoke(self, ctx: Any) -> Any:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("always", RuleWarning)
                warnings.showwarning = lambda message, *_: warn(str(message))
                returned = super().invoke(ctx)
                sys.stdout.flush()
                return returned
        except UnickptError as error:
            fail(str(error))
        except BrokenPipeError:  # such as by `| head`
            drop_output()
            raise typer.Exit from None
        except OSError as error:  # the library's own are UnickptErrors
            fail(f"the output cannot be written: {error}")


app = typer.Typer(
    cls=_CommandGroup,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(requested: bool) -> None:
    if requested:
        print(f"unickpt {unickpt.__version__}")
        raise typer.Exit


@app.callback()
def unickpt_command(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Inspect, check, convert and clean up checkpoints of sharded arrays on any storage.

    \b
    unickpt ls runs/llama                    list the checkpoints in a folder
    unickpt inspect runs/llama/step_100      show the tree of a checkpoint
    unickpt watch runs/llama                 follow the saves in progress
    unickpt report runs/llama -o r.html      write a page: steps, times, slow processes
    unickpt verify s3://bucket/llama/100     check every byte against its digest
    unickpt diff runs/a/100 runs/b/100       compare two checkpoints
    unickpt convert runs/jax/100 runs/torch --rules my.rules   rename, transpose, cast
    unickpt copy runs/llama/100 s3://b/100   copy and check a checkpoint
    unickpt import llama-hf runs/llama       read a checkpoint of another system
    unickpt export runs/llama llama-hf --to hf   write one for another system
    unickpt merge runs/llama average --last 5   average, TIES, SLERP and others
    unickpt clean runs/llama                 remove the remains of failed saves
    unickpt prune runs/llama --keep-last 3   remove steps that no rule keeps
    unickpt presets                          list the built-in rules
    unickpt doctor s3://bucket/runs          check the installation and a path
    unickpt rules observe convert:to_hf --example runs/jax/100   derive rules from a converter

    Exit codes: 0 for success; 1 if verify finds damage, diff finds a difference, or clean
    or prune is not confirmed; 2 for any other error. `| head` does not change them.
    """


COMMANDS: dict[str, Callable[..., None]] = {
    "inspect": inspect.command,
    "ls": ls.command,
    "verify": verify.command,
    "diff": diff.command,
    "convert": convert.command,
    "copy": convert.copy,
    "import": convert.import_,
    "export": convert.export,
    "clean": clean.command,
    "prune": prune.command,
    "presets": presets.command,
}
for name, command in COMMANDS.items():
    app.command(name)(command)
