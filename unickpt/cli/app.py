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
    """Look at checkpoints of sharded arrays, wherever they are stored.

    \b
    unickpt ls runs/llama                    which checkpoints are there
    unickpt inspect runs/llama/step_100      what is in one
    unickpt watch runs/llama                 how far its saves are
    unickpt report runs/llama -o r.html      a page of its steps, and of who was slow
    unickpt verify s3://bucket/llama/100     whether every byte is undamaged
    unickpt diff runs/a/100 runs/b/100       how two differ
    unickpt convert runs/jax/100 runs/torch --rules my.rules   make one from another
    unickpt copy runs/llama/100 s3://b/100   the same in another place
    unickpt import llama-hf runs/llama       make one from another system's
    unickpt export runs/llama llama-hf --to hf   write one for another system
    unickpt merge runs/llama average --last 5   make one of several: averages, TIES and others
    unickpt clean runs/llama                 remove what failed saves left
    unickpt prune runs/llama --keep-last 3   remove steps that no rule keeps
    unickpt presets                          the rules that come with unickpt
    unickpt doctor s3://bucket/runs          what is installed, and what a path supports
    unickpt rules observe convert:to_hf --example runs/jax/100   rules from a converter

    Exit codes: 0 for success, 1 if verify finds damage, diff finds a difference, or clean
    or prune is not confirmed, 2 for every other error; the same if the output is cut, as
    by `| head`.
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
