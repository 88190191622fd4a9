"""The command line. Heavy imports wait inside the commands, so that --help answers at once."""

import os
import signal
import sys
import threading
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from io import TextIOWrapper
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from dmlkit import __version__
from dmlkit.cli import (
    calibrate,
    cluster,
    compare,
    data,
    duplicates,
    embed,
    evaluate,
    export,
    gallery,
    geometry,
    identify,
    inspect,
    plot,
    protocol,
    recipes,
    search,
    start,
    status,
    study,
    train,
    verify,
)
from dmlkit.errors import UserError
from dmlkit.files.escape import excerpt, printable

MENDABLE = 2
DEFECT = 70  # EX_SOFTWARE of sysexits.h
STOPPED = 130  # as in dmlkit.distributed.stopping, which imports torch
MOST_LINES = 20  # of a message
MOST_CHARACTERS = 2000  # of a line of it


class Commands(TyperGroup):
    """All commands; what was mistyped is repeated, with what a terminal would obey spelled out."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Read the words before the command's name."""
        with usage_printable():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        """Read the words of a command, and run it."""
        with usage_printable():
            return super().invoke(ctx)


@contextmanager
def usage_printable() -> Generator[None]:
    """Rewrite an error of usage: typer spells out control characters, but no marks that turn the direction. Say that a
    command was stopped: typer would end without a word."""
    try:
        yield
    except KeyboardInterrupt:
        say_stopped()
        raise typer.Exit(STOPPED) from None
    except Exception as error:
        if isinstance(error, typer.BadParameter.__bases__):  # UsageError, which typer keeps to itself
            error.__dict__["message"] = printable(excerpt(str(error.__dict__["message"]), MOST_CHARACTERS))
        raise


app = typer.Typer(
    name="dmlkit",
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Deep metric learning from labelled images to searchable embeddings: "
    "[bold]train[/] a recipe, [bold]eval[/] it on unseen classes, [bold]embed[/] images, [bold]export[/] the result.",
    epilog="Start with:  dmlkit train recipes/glyphs/proxy_anchor.yaml --output runs/demo",
)
for group in (
    start,
    train,
    evaluate,
    compare,
    inspect,
    protocol,
    calibrate,
    verify,
    embed,
    search,
    gallery,
    identify,
    duplicates,
    cluster,
    export,
    data,
    geometry,
    plot,
    study,
    status,
    recipes,
):
    app.add_typer(group.app)


def main() -> None:
    """Run the command line; a user's mistake ends as one line and exit code 2, a defect of dmlkit with 70."""
    prepare_environment()
    with sigterm_as_interrupt():
        _run()


def _run() -> None:
    try:
        if sys.flags.optimize > 1:
            raise UserError(
                "python -OO leaves out docstrings, which geoopt and dmlkit list read; use python or python -O"
            )
        app()
    except KeyboardInterrupt:  # before typer reads a word
        say_stopped()
        raise SystemExit(STOPPED) from None
    except Exception as error:
        if "--debug" in sys.argv:
            raise
        for line in lines_of(told(error)):
            typer.secho(f"error: {line}", fg="red", err=True)
        raise SystemExit(MENDABLE if is_users(error) else DEFECT) from None


@contextmanager
def sigterm_as_interrupt() -> Generator[None]:
    """Let SIGTERM end a command as Ctrl-C does, with its partial files removed; training has its own handler."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def say_stopped() -> None:
    """Say that Ctrl-C or SIGTERM stopped a command that has nothing of its own to say of it."""
    typer.secho("stopped; run the same command again", fg="yellow", err=True)


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


def lines_of(text: str) -> list[str]:
    """A message as lines for a terminal: not too many, none too long."""
    lines = text.split("\n")
    more = [f"and {len(lines) - MOST_LINES} more"] if len(lines) > MOST_LINES else []
    return [printable(excerpt(line, MOST_CHARACTERS)) for line in lines[:MOST_LINES]] + more


def prepare_environment() -> None:
    """Take from the environment and the interpreter what would end a command that has no fault."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # None where it was closed
            stream.reconfigure(errors="backslashreplace")  # an ASCII output gets a plus-minus sign as its number
    os.environ["MPLBACKEND"] = "agg"  # pictures go into files, and matplotlib ends at a name that it does not know
    if not os.environ.get("COLUMNS", "1").isdigit() or int(os.environ.get("COLUMNS", "1")) == 0:
        del os.environ["COLUMNS"]  # rich prints nothing into 0 columns
    warnings.showwarning = show_warning


def show_warning(message: Warning | str, *_: object, **__: object) -> None:
    """A warning of any library as one plain line, without the path and the source line of who warns."""
    typer.secho(f"warning: {lines_of(str(message).strip())[0]}", fg="yellow", err=True)


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
