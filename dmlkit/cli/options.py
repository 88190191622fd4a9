"""Options that several commands share, declared once."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from functools import partial, wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import typer
from rich.console import Console

from dmlkit.cli.console import Output
from dmlkit.distributed.device_name import parse_device
from dmlkit.errors import UserError
from dmlkit.files.outputs import check_file
from dmlkit.files.regular import TABLES
from dmlkit.files.source import (
    partner_path,
    require_labels,
    require_queries,
    require_run,
    require_second_run,
    require_source,
    require_table,
    without_set,
)

if TYPE_CHECKING:
    from dmlkit.files.where import Where

SplitName = Literal["train", "validation", "test", "all"]
NAMES = {
    "k": ["-k"],
    "takes": ["--input"],
    "output": ["--output", "-o"],
    "number": ["--number", "-n"],
    "overrides": ["--set"],
    "every": ["--all"],
    "box_source": ["--boxes"],
    "second": ["--with"],
}
"""Options whose name is not that of their field or parameter."""
LAST = ("json", "device")
"""Options that end the screen of every command that has them, in this order."""


def checked(check: Callable[[Any], object]) -> Callable[..., Any]:
    """Return a callback that checks the path or paths of an argument before the command imports torch (3 s).

    Typer does not call it for --help, and it checks nothing where a command line is only parsed, outside the program.
    """

    def callback(context: typer.Context, value: Any) -> Any:
        if value is not None and context.parent is not None and not context.resilient_parsing:
            check(value)
        return value

    return callback


def where_of(text: str | None) -> "Where | None":
    """Return the conditions of ``--where``."""
    from dmlkit.files.where import Where

    return None if text is None else Where.of(text)


class Writes:
    """Mark of an option whose path a command writes; `with_options` checks it before torch is imported.

    Args:
        check: raises an error unless a path may be written; it gets ``args``, and the paths that the command reads as
            ``sources``.
    """

    def __init__(self, check: Callable[..., object], *args: Any) -> None:
        self.check, self.args = check, args


def check_written(annotations: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Check the paths that a command writes, as its options are marked by `Writes`."""
    paths = {name: value if isinstance(value, list) else [value] for name, value in values.items()}
    marks = {name: mark for name, kind in annotations.items() for mark in kind.__metadata__ if isinstance(mark, Writes)}
    sources = [path for name, listed in paths.items() if name not in marks for path in listed if isinstance(path, Path)]
    for name, mark in marks.items():
        for path in filter(None, paths[name]):
            mark.check(path, *mark.args, sources=sources)


def plain_device(device: str) -> None:
    """Refuse a runtime after the device, for commands whose figures are those of torch in float32."""
    name, plus, engine = device.partition("+")
    if plus:
        raise UserError(
            f"--device {device}: +{engine} applies to embed, search, identify, verify, gallery, serve, review, "
            f"select and calibrate; use --device {name}"
        )
    parse_device(device)


def any_device(device: str) -> None:
    """Check a device, perhaps with a runtime after it."""
    parse_device(device.partition("+")[0])


Set = Annotated[list[str] | None, "KEY=VALUE", "Override a key of the recipe, e.g. loss.margin=0.2. Repeatable."]
SetDataset = Annotated[
    list[str] | None, "KEY=VALUE", "Override a key of the run's dataset, e.g. dataset.root=PATH. Repeatable."
]
Device = Annotated[str, "DEVICE", "Where to compute: auto, cpu, cuda, cuda:N or mps.", plain_device]
ModelDevice = Annotated[
    str,
    "DEVICE",
    "Where to compute: auto, cpu, cuda, cuda:N or mps. Append +onnxruntime, +bf16 or +fastest for another runtime, "
    "e.g. cpu+fastest; otherwise torch in float32.",
    any_device,
]
RunDevice = Annotated[
    str | None, "DEVICE", "Device for a run: auto, cpu, cuda, cuda:N or mps. Default: auto.", plain_device
]
RunSplit = Annotated[
    SplitName | None,
    "SPLIT",
    "Split of a run: train, validation, test or all. Default: test; all for a run that final wrote.",
]
ArrayManifold = Annotated[
    Literal["sphere", "euclidean"] | None,
    "NAME",
    "For a file of vectors: sphere (compare by cosine) or euclidean (by distance). Default: sphere.",
]
ArrayLabels = Annotated[
    Path | None, "FILE", "For a file of vectors: file of its N labels, integers or text.", require_labels
]
Conditions = Annotated[
    str | None,
    "CONDITIONS",
    "Take only rows of a gallery, embeddings, a table or that of a run with e.g. 'side=left and year=2020..2022'; "
    "also COLUMN in A, B. Other columns: label, path, id.",
    where_of,
]
Json = Annotated[bool, "Print only JSON to standard output."]
AS_PARTNER = {"parser": partner_path}
"""How an option reads a second run, or ``local`` and the like."""
DryRun = Annotated[bool, "Check everything and print the plan; write nothing."]


def stem_of(file: Path) -> str:
    """Return the name of a recipe's or study's file without its endings; editors know recipes by ``.dmlkit.yaml``.

    Example:
        >>> stem_of(Path("birds.dmlkit.yaml")), stem_of(Path("birds.v2.yaml"))
        ('birds', 'birds.v2')
    """
    return file.stem.removesuffix(".dmlkit")


def examples(*commands: str) -> str:
    """Return the end of a help text: one example per line."""
    return "\n  ".join(["Example:" if len(commands) == 1 else "Examples:", *commands])


def declared(field: Parameter) -> Parameter | None:
    """Return a field of a dataclass, or a parameter, as the parameter of a command; None for one that is no option.

    An option is declared as ``Annotated[int | None, "COUNT", "Number of images that vote."]``: by its type, what
    ``--help`` shows as its value, and its meaning, which says what the default is if that is None. A flag has a meaning
    alone. A check of the value, a `Writes` and a dictionary of more options of `typer.Option` may follow. A field that
    many commands share, see `SHARED`, has none. Parameters before the ``/`` of a command are arguments.
    """
    kind, *metadata = get_args(field.annotation) if get_origin(field.annotation) is Annotated else (field.annotation,)
    if not metadata:
        return declared(field.replace(annotation=SHARED[field.name], default=None)) if field.name in SHARED else None
    texts = [text for text in metadata if isinstance(text, str)]
    if not texts:
        return field
    marks = [mark for mark in metadata if isinstance(mark, Writes)]
    more: dict[str, Any] = {"help": texts[-1], "metavar": texts[0] if len(texts) > 1 else None}
    more |= {} if (check := next(filter(callable, metadata), None)) is None else {"callback": checked(check)}
    more |= next((options for options in metadata if isinstance(options, dict)), {})
    if field.kind is Parameter.POSITIONAL_ONLY:
        return field.replace(annotation=Annotated[kind, *marks, typer.Argument(**more)])
    names = NAMES.get(field.name, [f"--{field.name.replace('_', '-')}"])
    return field.replace(annotation=Annotated[kind, *marks, typer.Option(*names, **more)])


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command that has the fields of parameters that are dataclasses as its options, with `LAST` at the end.

    What it writes is checked by `check_written`, how a field becomes an option is said by `declared`.
    """
    own = signature(command).parameters
    kinds: dict[str, Any] = {name: one.annotation for name, one in own.items() if is_dataclass(one.annotation)}
    groups = {
        name: list(filter(None, map(declared, signature(kind).parameters.values()))) for name, kind in kinds.items()
    }
    fields = [field for name, one in own.items() for field in groups.get(name, [declared(one)]) if field]
    fields.sort(key=lambda field: LAST.index(field.name) if field.name in LAST else -1)
    parameters = [field.replace(kind=Parameter.KEYWORD_ONLY) for field in fields]
    annotations = {parameter.name: parameter.annotation for parameter in parameters}
    arguments = [name for name, one in own.items() if one.kind is Parameter.POSITIONAL_ONLY]

    @wraps(command)
    def run(**options: Any) -> None:
        check_written(annotations, options)
        Output.console = Console(stderr=options.get("json", False))
        values = {name: options[name] for name in own if name not in groups}
        for name, group in groups.items():
            given = {field.name: options[field.name] for field in group if options[field.name] is not None}
            values[name] = kinds[name](**given)
        try:
            command(*[values.pop(name) for name in arguments], **values)
        except UserError as error:
            if (text := without_set(str(error), options)) == str(error):
                raise
            raise UserError(text) from error

    run.__dict__["__signature__"] = Signature(parameters)
    run.__annotations__ = annotations
    return run


APPS = defaultdict[str, typer.Typer](typer.Typer)
"""The commands of each module."""


def command(*lines: str, **more: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds a command with examples to those of its module; ``more`` is that of typer."""
    return lambda run: APPS[run.__module__].command(epilog=examples(*lines), **more)(with_options(run))


def each(check: Callable[[Path], object]) -> Callable[[list[Path]], object]:
    """Return a check of several paths."""
    return lambda paths: [*map(check, paths)]


RunPath = Annotated[Path, "RUN", "Run folder, written by train; or timm:NAME, a pretrained model.", require_run]


def second_run(*allowed: str) -> Callable[[Path], None]:
    """Return a check that a path is a run, or one of some names instead."""
    return partial(require_second_run, allowed=tuple(map(Path, allowed)))


def column_of(by: str | None) -> tuple[str, Path | None] | None:
    """Return the column and the table that ``--by`` names; None without it.

    Example:
        >>> column_of("camera"), column_of("birds.csv:camera"), column_of("a:b")
        (('camera', None), ('camera', PosixPath('birds.csv')), ('a:b', None))
    """
    if by is None:
        return None
    table, _, column = by.rpartition(":")
    return (column, Path(table)) if Path(table).suffix.lower() in TABLES else (by, None)


def check_by(by: str) -> None:
    """Raise a `UserError` unless the table that ``--by`` names exists."""
    if (column := column_of(by)) and column[1] is not None:
        require_table(column[1])


COLUMN = "[FILE:]COLUMN"
PER_VALUE = (
    "per value of this column of a table, e.g. camera, worst first. FILE: another table with the columns path and "
    "COLUMN. Default: the table that was embedded, or that of the run's dataset."
)
"""What ``--by`` names, and the end of its meaning."""
PAGE = ".html"
Files = Annotated[
    list[Path] | None,
    "FILE",
    "Write all of it: a .csv table, or an .html page with pictures. Repeatable.",
    Writes(check_file, (".csv", PAGE)),
]
RerankMethod = Annotated[
    str | None,
    "METHOD",
    "Rank the images once more for each query: k_reciprocal or expansion; options after a colon, e.g. expansion:n=3. "
    "Defaults: k1=20, k2=6, weight=0.3; n=5, alpha=3.",
]
QueryPath = Annotated[
    Path,
    "QUERIES",
    "Image, video, folder or table of images, or embeddings (as SOURCE) of the same model.",
    require_queries,
]
SourcePath = Annotated[
    Path, "SOURCE", "Run, timm:NAME, embeddings folder, gallery, or file of vectors (N, D).", require_source
]
RecipePath = Annotated[Path, "RECIPE", "YAML file, or a name from dmlkit list recipes, e.g. glyphs/proxy_anchor."]
Checkpoint = Annotated[
    Literal["best", "last", "pretrained"] | None,
    "NAME",
    "Checkpoint: best (on validation classes), last, or pretrained (before training, without the head). Default: best "
    "if there is one, otherwise last.",
]
SHARED = {"checkpoint": Checkpoint, "overrides": SetDataset}
"""Fields that are the same option in every dataclass of the library."""
