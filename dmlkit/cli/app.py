"""The command line. Heavy imports wait inside the commands, so that --help answers at once."""

import sys
from typing import Annotated

import typer

from dmlkit import __version__
from dmlkit.cli import compare, data, embed, evaluate, export, geometry, protocol, recipes, study, train
from dmlkit.errors import UserError

DEFECT = 70  # EX_SOFTWARE of sysexits.h

app = typer.Typer(
    name="dmlkit",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Deep metric learning from labelled images to searchable embeddings: "
    "[bold]train[/] a recipe, [bold]eval[/] it on unseen classes, [bold]embed[/] images, [bold]export[/] the result.",
    epilog="Start with:  dmlkit train recipes/glyphs/proxy_anchor.yaml --output runs/demo",
)
for group in (train, evaluate, compare, protocol, embed, export, data, geometry, study, recipes):
    app.add_typer(group.app)


def main() -> None:
    """Run the command line; a user's mistake ends as one line and exit code 2, a defect of dmlkit with 70."""
    try:
        app()
    except Exception as error:
        if "--debug" in sys.argv:
            raise
        for line in told(error).splitlines():
            typer.secho(f"error: {printable(line)}", fg="red", err=True)
        raise SystemExit(2 if is_users(error) else DEFECT) from None


def is_users(error: Exception) -> bool:
    """Whether the user, or the machine, can mend it."""
    return isinstance(error, UserError | OSError | MemoryError)


def told(error: Exception) -> str:
    """What to say of an error."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError):
        names = " -> ".join(str(name) for name in (error.filename, error.filename2) if name is not None)
        return f"{names}: {error.strerror}" if names and error.strerror else str(error)
    if isinstance(error, MemoryError):
        return f"not enough memory: {error}"
    first = (str(error).splitlines() or [""])[0]
    return f"a defect of dmlkit {__version__}: {type(error).__name__}: {first}; --debug shows where: please report it"


def printable(text: str) -> str:
    """See `dmlkit.cli.console.printable`, which is imported only when there is something to print."""
    from dmlkit.cli import console

    return console.printable(text)


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"dmlkit {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None: ...
