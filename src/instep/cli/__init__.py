"""The command ``instep``: one file per verb."""

from __future__ import annotations

import sys

import typer

from instep import __version__
from instep.cli import logs, ps, run, sandbox, stop, why, world
from instep.errors import InstepError, show

app = typer.Typer(
    name="instep",
    help="From bare machines to a finished multi-node PyTorch run, with every rank kept in step.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: importing rich costs as long as all the rest
    context_settings={"help_option_names": ["-h", "--help"]},
)
# One line per verb. A verb imports what it needs when it is used.
app.command("run", context_settings=run.SETTINGS, options_metavar=run.USAGE)(run.run_command)
app.add_typer(sandbox.app, name="sandbox")
app.command("ps")(ps.ps_command)
app.command("logs")(logs.logs_command)
app.command("stop")(stop.stop_command)
app.command("why")(why.why_command)
app.command("world")(world.world_command)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"instep {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", help="Print the version.", is_eager=True, callback=_print_version),
) -> None:
    pass


def main() -> None:
    """Entry point of the command: an error of ours is its text and its exit code, never a traceback."""
    try:
        app()
    except InstepError as error:
        show(error)
        sys.exit(error.exit_code)
