"""Options that several commands share, declared once."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass
from functools import partial, wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dmlkit.distributed.device_name import parse_device
from dmlkit.errors import UserError
from dmlkit.files.outputs import check_page
from dmlkit.files.source import (
    LOCAL,
    PLACE,
    SIFT,
    partner_path,
    require_array,
    require_path,
    require_queries,
    require_run,
    require_searched,
    require_second_run,
    require_source,
    require_table,
    without_set,
)

if TYPE_CHECKING:
    from dmlkit.datasets.files.boxes import Boxes
    from dmlkit.embedding.fusion import ModelChoice
    from dmlkit.embedding.points import PointSet

TRAIN, USE, LOOK, RESEARCH, MORE = "Train and measure", "Use", "Look", "Research", "More"
"""The panels of `dmlkit --help`."""
SplitName = Literal["train", "validation", "test", "all"]


def checked(check: Callable[[Any], object]) -> Callable[..., Any]:
    """Return a callback that checks the path or paths of an argument before the command imports torch (3 s).

    Typer does not call it for --help, and it checks nothing where a command line is only parsed, outside the program.
    """

    def callback(context: typer.Context, value: Any) -> Any:
        if value is not None and context.parent is not None and not context.resilient_parsing:
            check(value)
        return value

    return callback


def option(metavar: str, meaning: str, *names: str, check: Callable[[Any], object] | None = None, **more: Any) -> Any:
    """Return an option whose help says itself what its default is.

    Args:
        metavar: what ``--help`` shows as its value.
        meaning: the help.
        names: its names. Default: that of the parameter.
        check: raises an error unless a value may be given, see `checked`.
        more: see `typer.Option`.
    """
    more |= {} if check is None else {"callback": checked(check)}
    return typer.Option(*names, metavar=metavar, help=meaning, show_default=False, **more)


def argument(metavar: str, meaning: str, *, check: Callable[[Any], object] | None = None, **more: Any) -> Any:
    """Return an argument, see `option`."""
    more |= {} if check is None else {"callback": checked(check)}
    return typer.Argument(metavar=metavar, help=meaning, show_default=False, **more)


class Writes:
    """Mark of an option whose path a command writes; `with_common_options` checks it before torch is imported.

    Args:
        check: raises an error unless a path may be written; it gets ``args``, the paths that the command reads as
            ``sources``, and the name of the option.
    """

    def __init__(self, check: Callable[..., object], *args: Any) -> None:
        self.check, self.args = check, args


def check_written(annotations: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Check the paths that a command writes, as its options are marked by `Writes`.

    Args:
        annotations: those of all parameters by name.
        values: their values.
    """
    kinds = {name: getattr(kind, "__metadata__", ()) for name, kind in annotations.items()}
    marks = {name: one for name, data in kinds.items() for one in data if isinstance(one, Writes)}
    read = [value for name, value in values.items() if name not in marks]
    paths = [path for value in read for path in (value if isinstance(value, list) else [value])]
    sources = [path for path in paths if isinstance(path, Path)]
    for name, mark in marks.items():
        if values[name] is not None:
            mark.check(values[name], *mark.args, sources=sources, option=f"--{name.replace('_', '-')}")


def plain_device(device: str) -> None:
    """Refuse a runtime after the device, for commands whose figures are those of torch in float32."""
    place, plus, engine = device.partition("+")
    if plus:
        raise UserError(
            f"--device {device}: +{engine} applies to embed, search, identify, verify, gallery, serve, review and "
            f"calibrate; use --device {place}"
        )
    parse_device(device)


def any_device(device: str) -> None:
    """Refuse what is not the name of a device, or of one with a runtime after it."""
    parse_device(device.partition("+")[0])


Set = Annotated[
    list[str] | None, option("KEY=VALUE", "Override a key of the recipe, e.g. loss.margin=0.2. Repeatable.", "--set")
]
SetDataset = Annotated[
    list[str] | None,
    option("KEY=VALUE", "Override a key of the run's dataset, e.g. dataset.root=PATH. Repeatable.", "--set"),
]
Device = Annotated[
    str,
    typer.Option(
        metavar="DEVICE",
        help="Where to compute: auto, cpu, cuda, cuda:N or mps.",
        callback=checked(plain_device),
    ),
]
ModelDevice = Annotated[
    str,
    typer.Option(
        "--device",
        metavar="DEVICE",
        help="Where to compute: auto, cpu, cuda, cuda:N or mps. Append +onnxruntime, +openvino, +bf16 or +fastest for "
        "another runtime, e.g. cpu+fastest; otherwise torch in float32.",
        callback=checked(any_device),
    ),
]
RunDevice = Annotated[
    str | None,
    option(
        "DEVICE", "Device for a run: auto, cpu, cuda, cuda:N or mps. Default: auto.", "--device", check=plain_device
    ),
]
RunSplit = Annotated[
    SplitName | None,
    option(
        "SPLIT",
        "Split of a run: train, validation, test or all. Default: test; all for a run that final wrote.",
        "--split",
    ),
]
ArrayManifold = Annotated[
    Literal["sphere", "euclidean"] | None,
    option(
        "NAME",
        "For an .npy file: sphere (compare by cosine) or euclidean (by distance). Default: sphere.",
        "--manifold",
    ),
]
ArrayLabels = Annotated[
    Path | None,
    option("FILE", "For an .npy file: .npy file of its N labels, integers or text.", "--labels", check=require_array),
]
Debug = Annotated[bool, typer.Option("--debug", help="Print the traceback of an error.")]
Json = Annotated[bool, typer.Option("--json", help="Print only JSON to standard output.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check everything and print the plan; write nothing.")]


def examples(*commands: str) -> str:
    """Return the end of a help text: one example per line."""
    return "\n  ".join(["Example:" if len(commands) == 1 else "Examples:", *commands])


def load_plugins(files: list[Path] | None) -> list[Path] | None:
    """Load the files of ``--plugin`` before the command reads a recipe that may name their members."""
    if files:
        from importlib import import_module

        from dmlkit.recipe.plugin import load_file

        import_module("dmlkit.recipe.schema")  # registers installed plug-ins first: a file must not reuse their names
        for file in files:
            load_file(file)
    return files


Plugins = Annotated[
    list[Path] | None,
    option(
        "FILE", "Load a Python file that defines components of your own. Repeatable.", "--plugin", callback=load_plugins
    ),
]


def with_common_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add --plugin and --debug to a command that reads neither, and check what it writes by `check_written`.

    A parameter whose type is a dataclass stands for several options, its fields. A callback loads plug-ins, and `main`
    looks for --debug.
    """
    own = signature(command).parameters.values()
    kinds = {one.name: one.annotation for one in own}
    groups = {name: kind for name, kind in kinds.items() if isinstance(kind, type) and is_dataclass(kind)}
    added = [
        Parameter("plugins", Parameter.KEYWORD_ONLY, default=None, annotation=Plugins),
        Parameter("debug", Parameter.KEYWORD_ONLY, default=False, annotation=Debug),
    ]
    parameters: list[Parameter] = []
    for one in [*own, *added]:
        fields = signature(groups[one.name]).parameters.values() if one.name in groups else [one]
        parameters += [field.replace(kind=one.kind) for field in fields]
    annotations = {one.name: one.annotation for one in parameters}

    @wraps(command)
    def run(*, plugins: object, debug: object, **options: Any) -> None:
        check_written(annotations, options)
        values = dict(options)
        for name, group in groups.items():
            values[name] = group(**{field: values.pop(field) for field in signature(group).parameters})
        try:
            command(**values)
        except UserError as error:
            if (text := without_set(str(error), options)) == str(error):
                raise
            raise UserError(text) from error

    run.__dict__["__signature__"] = Signature(parameters)
    run.__annotations__ = annotations
    return run


def existing(expected: str) -> Callable[..., Any]:
    """Return a callback that checks that a path exists, see `checked`; ``expected`` says what should be there."""
    return checked(partial(require_path, expected=expected))


def each(check: Callable[[Path], object]) -> Callable[[list[Path]], None]:
    """Return a check of several paths."""

    def check_all(paths: list[Path]) -> None:
        for path in paths:
            check(path)

    return check_all


RunPath = Annotated[Path, argument("RUN", "Run folder, written by train.", check=require_run)]


@dataclass(frozen=True)
class BoxOptions:
    """Options on boxes of images."""

    box_source: Annotated[
        Path | None,
        option(
            "PATH",
            "Use boxes of the images: a folder of YOLO's .txt files, or a .json file of COCO or MegaDetector.",
            "--boxes",
            callback=existing("a folder of .txt files or a .json file"),
        ),
    ] = None
    box_margin: Annotated[
        float | None,
        option("SHARE", "Margin on each side of a box, as a share of its width or height. Default: 0.", "--box-margin"),
    ] = None
    box_confidence: Annotated[
        float | None,
        option(
            "NUMBER",
            "Minimum confidence of a detected box, 0 to 1; others are left out. Default: 0.2.",
            "--box-confidence",
        ),
    ] = None

    def given(self) -> dict[str, object]:
        """Return the values by the names of the options."""
        return {"--boxes": self.box_source, "--box-margin": self.box_margin, "--box-confidence": self.box_confidence}

    def read(self) -> "Boxes | None":
        """Return the options; None without any, for which nothing is imported.

        Raises:
            UserError: there is a confidence, but no file of boxes.
        """
        if not any(value is not None for value in self.given().values()):
            return None
        from dmlkit.datasets.files.boxes import boxes_of

        return boxes_of(self.box_source, self.box_margin, self.box_confidence)


ColumnTable = Annotated[
    Path | None,
    option(
        "FILE",
        "Table with the columns path and --by. Default: the table that the run was trained on.",
        "--table",
        check=require_table,
    ),
]


def second_option(metavar: str, meaning: str, *allowed: str) -> Any:
    """Return the option ``--with`` of a command, which takes a second run, or one of some names instead."""
    check = partial(require_second_run, allowed=tuple(map(Path, allowed)))
    return option(metavar, meaning, "--with", check=check, parser=partner_path if allowed else None)


WithRun = Annotated[
    Path | None,
    second_option("RUN", "Add the similarity of a second run of the same dataset, weighted by validation classes."),
]
WithFeatures = Annotated[
    Path | None,
    second_option(
        "RUN|local|sift",
        "Add a second similarity, weighted by validation classes: that of a second run of the same dataset, or of the "
        "patches (local) or keypoints (sift) of the 100 nearest images, which the gallery keeps. For a run in a "
        "folder of such a name, write ./local or ./sift.",
        LOCAL,
        SIFT,
    ),
]
WithPlace = Annotated[
    Path | None,
    second_option(
        "RUN|place",
        "Add the similarity of a second run of the same dataset, or, with place, that of the columns latitude, "
        "longitude and time of a gallery and a table of images; weighted by validation classes. For a run in a "
        "folder named place, write ./place.",
        PLACE,
    ),
]
MovedRun = Annotated[Path | None, option("RUN", "The gallery's run, if it has moved.", check=require_run)]
Html = Annotated[Path | None, Writes(check_page), option("FILE", "Write an HTML page with pictures.", "--html")]
RerankMethod = Annotated[
    str | None,
    option(
        "METHOD",
        "Rank the images once more for each query: k_reciprocal or expansion; options after a colon, e.g. "
        "expansion:n=3. Defaults: k1=20, k2=6, weight=0.3; n=5, alpha=3.",
    ),
]
QueryRun = Annotated[
    Path | None,
    option("RUN", "Run that embeds new images. Default: the run that SOURCE names.", "--run", check=require_run),
]
QueryPath = Annotated[
    Path,
    argument(
        "QUERIES",
        "Image, video, folder or table of images, or embeddings (as SOURCE) of the same model.",
        check=require_queries,
    ),
]
SourcePath = Annotated[
    Path, argument("SOURCE", "Run, embeddings folder, gallery, or .npy file (N, D) of vectors.", check=require_source)
]
SearchedPath = Annotated[
    Path,
    argument(
        "SOURCE",
        "Run, embeddings folder, gallery, exported gallery (.onnx), or .npy file (N, D) of vectors.",
        check=require_searched,
    ),
]
RecipePath = Annotated[
    Path, argument("RECIPE", "YAML file, or a name from dmlkit list recipes, e.g. glyphs/proxy_anchor.")
]
Checkpoint = Annotated[
    Literal["best", "last"] | None,
    option("NAME", "Checkpoint: best (on validation classes) or last. Default: best if there is one."),
]


@dataclass(frozen=True)
class SourceOptions:
    """Options of a command that reads any points."""

    split: RunSplit = None
    overrides: SetDataset = None
    device: RunDevice = None

    def open(self, source: Path, **others: Any) -> "PointSet":
        """Open points, see `open_points`."""
        from dmlkit.embedding.fusion import ModelChoice
        from dmlkit.embedding.sources import open_points

        model = ModelChoice(device=self.device)
        return open_points(source, split=self.split, overrides=self.overrides or [], model=model, **others)


@dataclass(frozen=True)
class ModelOptions:
    """Options on the model that embeds new images, and on a second one."""

    run: QueryRun = None
    second: WithRun = None
    device: ModelDevice = "auto"

    def choose(self, source: Path, **others: Any) -> "ModelChoice":
        """Return the model for images that are compared with a source, see `fusion_of`."""
        from dmlkit.embedding.fusion import ModelChoice
        from dmlkit.evaluation.fusion import fusion_of

        fusion = fusion_of(source, self.second, device=self.device, **others)
        return ModelChoice(self.run, fusion=fusion, device=self.device)
