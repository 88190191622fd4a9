"""The command line. Commands import torch and other heavy packages in their bodies, so that --help is quick."""

import gc
import logging
import os
import signal
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, wraps
from importlib import import_module
from io import TextIOWrapper
from itertools import islice
from pathlib import Path
from threading import Timer
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption
from typer.main import get_group

from dmlkit import __version__
from dmlkit._deprecated import WORDS, warn_of
from dmlkit.cli.console import wrapped
from dmlkit.cli.options import APPS
from dmlkit.errors import UserError, first_line, killed_reader, out_of_memory, reason_of, warn_once
from dmlkit.files.escape import excerpt, printable

USER_ERROR = 2  # exit codes
INTERNAL_ERROR = 70  # EX_SOFTWARE of sysexits.h
STOPPED = 130  # as in dmlkit.distributed.stopping, which imports torch
RETRY = 0.01  # seconds, after which the code that ignored an interrupt has returned
MOST_LINES = 21  # per message: 20 problems, and the number of the others, see `raise_faults`
MOST_CHARACTERS = 2000  # per line of a message
PANELS = {
    "Train and measure": "start data train eval compare calibrate final",
    "Use": "embed search gallery identify verify review select serve duplicates cluster export align",
    "Look": "inspect why plot",
    "Research": "study report status curvature",
    "More": "list copy check schema report-bug",
}
"""Panels of ``dmlkit --help``, with the names of their commands."""
PANEL_OF = {name: panel for panel, names in PANELS.items() for name in names.split()}
MODULES = {
    **{"eval": "evaluate", "report-bug": "report_bug", "curvature": "geometry"},
    **{"final": "train", "report": "study", "status": "study"},
    **dict.fromkeys(("list", "copy", "check", "schema"), "recipes"),
}
"""Modules of commands that have another name."""


class Loading(Mapping[str, Any]):
    """The commands by name; the module of each is imported when it is asked for: all of them take 0.1 s."""

    def __getitem__(self, name: str) -> Any:
        panel, group = PANEL_OF[name], group_in(MODULES.get(name, name))
        command: Any = group if group.name else group.commands[name]
        command.rich_help_panel = panel
        return command

    def __iter__(self) -> Iterator[str]:
        return iter(PANEL_OF)

    def __len__(self) -> int:
        return len(PANEL_OF)


@cache
def group_in(module: str) -> TyperGroup:
    """Return the commands of a module."""
    return get_group(APPS[import_module(f"dmlkit.cli.{module}").__name__])


class Commands(TyperGroup):
    """The group of all commands. Errors of usage repeat what was typed, with control characters escaped."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands: Any = Loading()

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the options of all commands, ``--debug`` and ``--plugin``, wherever they are in the line."""
        global_words: list[str] = []
        others: list[str] = []
        words = iter(args)
        for word in words:
            is_global = word in ("--debug", "--plugin") or word.startswith("--plugin=")
            (global_words if is_global else others).append(word)
            global_words += islice(words, 1) if word == "--plugin" else []
        return super().parse_args(ctx, global_words if global_words[-1:] == ["--plugin"] else [*global_words, *others])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command, with new names for the old ones of commands and options."""
        command = _current(args[0], args[0])
        parts = [word.partition("=") for word in args[1:]]
        return super().resolve_command(
            ctx, [command, *(_current(f"{command} {word}", word) + equals + value for word, equals, value in parts)]
        )

    def list_commands(self, ctx: Any) -> list[str]:
        return [*PANEL_OF]  # in the order of the panels

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        with usage_printable():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        with usage_printable():
            return super().invoke(ctx)


def _current(key: str, word: str) -> str:
    return warn_of(word, WORDS[key]) if key in WORDS else word


def value_name(parameter: Any, **_: Any) -> str | None:
    """Return what ``--help`` shows as the value of a parameter: nothing for a flag or an argument.

    Typer prints ``--overwrite <bool>``, which reads as if a value followed, and ``RUN <list[Path]>``.
    """
    return None if getattr(parameter, "is_flag", True) else parameter.metavar


for kind in (TyperArgument, TyperOption):
    setattr(kind, "display_type_rich", value_name)  # noqa: B010 (of Typer 0.24 and later)


def refuse_second_values(parse: Callable[..., list[str]]) -> Callable[..., list[str]]:
    """Return ``TyperCommand.parse_args`` with an error for an option that is given twice; Typer keeps the last one."""

    @wraps(parse)
    def parse_args(command: Any, ctx: Any, args: list[str]) -> list[str]:
        _, _, parameters = command.make_parser(ctx).parse_args(list(args))  # parameters in the order of the words
        single = [one for one in parameters if isinstance(one, TyperOption) and not (one.multiple or one.is_flag)]
        for option, times in Counter(single).items():
            if times > 1:
                raise UserError(f"{max(option.opts, key=len)}: given {times} times, but takes one value; give it once")
        return parse(command, ctx, args)

    return parse_args


TyperCommand.parse_args = refuse_second_values(TyperCommand.parse_args)


@contextmanager
def usage_printable() -> Generator[None]:
    """Escape the message of a usage error, and print a line when a command is stopped.

    Typer escapes control characters, but not marks of text direction, and ends without a message on Ctrl-C.
    """
    try:
        yield
    except KeyboardInterrupt:
        say_stopped()
        raise typer.Exit(STOPPED) from None
    except Exception as error:
        if isinstance(error, typer.BadParameter.__bases__):  # UsageError, which typer does not export
            text = str(error.__dict__["message"]).removeprefix("Value error, ")  # of pydantic, which reads choices
            error.__dict__["message"] = printable(excerpt(text, MOST_CHARACTERS))
        raise


app = typer.Typer(
    name="dmlkit",
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Deep metric learning, from labeled images to searchable embeddings: [bold]train[/] a recipe, "
    "[bold]eval[/] the run on classes it has not seen, [bold]embed[/] images, [bold]search[/] them.",
    epilog="Start with an example, or with your own photos:\n"
    "  dmlkit train glyphs/proxy_anchor --output runs/demo\n  dmlkit start photos/",
)


def main() -> None:
    """Run the command line; print an error as one line and exit with 2 (user error) or 70 (internal error)."""
    prepare_environment()
    with interruptible() as received:
        try:
            if sys.flags.optimize > 1:
                raise UserError("python -OO removes docstrings, which geoopt and dmlkit list need; use python -O")
            try:
                Path.cwd()
            except FileNotFoundError:  # Intel's MKL, which torch loads, would end the process
                raise UserError("the current folder was deleted; change to another one") from None
            app()
        except (Exception, KeyboardInterrupt) as error:
            # before typer reads a word; or compiled code made another error of it, such as pydantic's SchemaError
            if received or isinstance(error, KeyboardInterrupt):
                say_stopped()
                raise SystemExit(STOPPED) from None
            if "--debug" in sys.argv:
                raise
            if plugin := sys.modules.get("dmlkit.recipe.plugin"):
                error = plugin.plugin_error(error) or error
            text, code = message_of(error)
            for line in lines_of(text):
                print_message(f"error: {line}", "red")
            drop_unwritten()
            raise SystemExit(code) from None


@contextmanager
def interruptible() -> Generator[list[int]]:
    """Let Ctrl-C and SIGTERM end any command, and remove partial files; training has its own handlers.

    Yields the numbers of the signals received so far.

    A KeyboardInterrupt is lost where C calls Python and ignores its errors, such as a finalizer; then it is sent again.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield received
        return

    def interrupt(number: int, _: Any) -> None:
        received.append(number)
        raise KeyboardInterrupt

    def again(lost: Any) -> None:
        if isinstance(lost.exc_value, KeyboardInterrupt):
            Timer(RETRY, os.kill, (os.getpid(), next(reversed(received), signal.SIGINT))).start()
        else:
            previous(lost)

    previous = sys.unraisablehook
    sys.unraisablehook = again
    before = {signal.SIGTERM: signal.signal(signal.SIGTERM, interrupt)}
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell ignores it in the background
        before[signal.SIGINT] = signal.signal(signal.SIGINT, interrupt)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        sys.unraisablehook = previous


def drop_unwritten() -> None:
    """Drop the output that cannot be written: Python 3.14 tries it again at its end, and exits with 120."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def say_stopped() -> None:
    """Print that Ctrl-C or SIGTERM stopped a command that prints no message of its own."""
    typer.secho("stopped; run the same command again", fg="yellow", err=True)


def message_of(error: Exception) -> tuple[str, int]:
    """Return the message to print for an error, and the exit code."""
    if isinstance(error, UserError | OSError):
        return reason_of(error), USER_ERROR
    if memory := out_of_memory(error):
        advice = "; other programs may use the GPU too, and --device cpu does without it" if "CUDA" in memory else ""
        return f"not enough memory: {memory}{advice}", USER_ERROR
    if killed := killed_reader(error):
        return f"{killed}; run the same command again", USER_ERROR
    report = "please report it with the traceback that --debug prints"
    plugin = sys.modules.get("dmlkit.recipe.plugin")
    if plugin and (names := ", ".join(path.name for path in plugin.plugin_files())):
        report = f"if dmlkit.testing finds no fault in {names}, {report}"
    kind = type(error).__name__
    return f"internal error of dmlkit {__version__}: {kind}: {first_line(error)}; {report}", INTERNAL_ERROR


def lines_of(text: str) -> list[str]:
    """Split a message into lines for a terminal: at most `MOST_LINES`, each at most `MOST_CHARACTERS` long."""
    lines = text.split("\n")
    more = [f"and {len(lines) - MOST_LINES} more"] if len(lines) > MOST_LINES else []
    return [printable(excerpt(line, MOST_CHARACTERS)) for line in lines[:MOST_LINES]] + more


def prepare_environment() -> None:
    """Change settings of the environment and the streams that would stop a correct command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # None if it was closed
            stream.reconfigure(errors="backslashreplace")  # an ASCII stream gets an escape for a plus-minus sign
    os.environ["MPLBACKEND"] = "agg"  # plots go to files; matplotlib fails at an unknown name
    # Threads that wait by spinning take the processor from others: at a load of 5 a photo took 1.1 s instead of 0.02 s.
    # Threads that sleep at once are late for the next layer: a served photo took 33 ms instead of 19. They spin a bit.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "passive"
        os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    gc.set_threshold(20_000)  # imports make 270 000 objects that stay: their collections take 0.15 s instead of 0.4 s
    if not os.environ.get("COLUMNS", "1").isdecimal() or int(os.environ.get("COLUMNS", "1")) == 0:
        del os.environ["COLUMNS"]  # rich prints nothing in 0 columns
    warnings.showwarning = show_warning
    warn_once.cache_clear()  # a command before it in this process may have had the same warnings
    logger = logging.getLogger("dmlkit")
    if not any(isinstance(handler, LogMessages) for handler in logger.handlers):
        logger.addHandler(LogMessages(logging.WARNING))


def show_warning(message: Warning | str, *_: object, **__: object) -> None:
    """Print the warning of any library as one line, without the path and the source line."""
    print_message(f"warning: {lines_of(str(message).strip())[0]}", "yellow")


class LogMessages(logging.Handler):
    """Handler that prints what dmlkit logs like its other messages."""

    def emit(self, record: logging.LogRecord) -> None:
        for line in self.format(record).split("\n"):  # with the traceback of an error of a server
            print_message(printable(excerpt(line, MOST_CHARACTERS)), "yellow")


def print_message(text: str, color: str) -> None:
    """Print a message to stderr: one line, which a terminal shows wrapped between words."""
    if sys.stderr and sys.stderr.isatty():
        text = "\n".join(wrapped(text, Console(stderr=True).width))
    typer.secho(text, fg=color, err=True)


def load_plugins(files: list[Path] | None) -> None:
    """Load the files of ``--plugin`` before a command reads a recipe that may name their members."""
    if files:
        from dmlkit.recipe.plugin import load_file

        import_module("dmlkit.recipe.schema")  # registers installed plug-ins first: a file must not reuse their names
        for file in files:
            load_file(file)


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"dmlkit {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    plugin: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="For any command: load a Python file that defines components of your own. Repeatable.",
            callback=load_plugins,
        ),
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="For any command: print the traceback of an error.")] = False,
) -> None: ...
