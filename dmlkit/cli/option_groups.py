"""Groups of options that several commands share; a group is one parameter of a command, see `with_options`."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from dmlkit.cli.console import bars, fusion_line, say
from dmlkit.cli.options import (
    ArrayLabels,
    ArrayManifold,
    Conditions,
    ModelDevice,
    RunDevice,
    RunSplit,
    SetDataset,
    second_run,
    where_of,
)
from dmlkit.errors import UserError
from dmlkit.files.source import Kind, check_options, kind_of, require_folder, require_path, require_run

if TYPE_CHECKING:
    from dmlkit.datasets.files.boxes import Boxes
    from dmlkit.vectors.fusion import ModelChoice
    from dmlkit.vectors.points import PointSet


@dataclass(frozen=True)
class TableOptions:
    """Options on the columns of a table of images."""

    column: Annotated[
        list[str] | None,
        "NAME=COLUMN",
        "Read this column of a table, e.g. label=species, path={folder}/{file}, or group= for none; group=day: photos "
        "of a class of one day, by time or EXIF data, are a group (start, data check). Names: path, label, group, "
        "split, query, gallery, super_class, latitude, longitude, time, x1, y1, x2, y2, bbox. "
        "label='(?P<label>\\d+)_' takes a part of the path; unknown=TEXT is no label. Default: "
        "usual names.",
    ] = None
    root: Annotated[
        Path | None,
        "FOLDER",
        "Folder that the paths of a table are relative to. Default: that of the table.",
        require_folder,
    ] = None

    def columns(self) -> dict[str, str]:
        """Return the values of ``--column`` as a dictionary.

        Example:
            >>> TableOptions(column=["label=species", "group="]).columns()
            {'label': 'species', 'group': ''}
        """
        texts = self.column or []
        if wrong := next((text for text in texts if "=" not in text), None):
            raise UserError(f"--column {wrong}: expected NAME=COLUMN, e.g. label=species")
        columns = dict[str, str]()
        for name, _, column in (text.partition("=") for text in texts):
            if name.strip() in columns:
                raise UserError(f"--column {name.strip()}: given twice, but takes one column; give it once")
            columns[name.strip()] = column.strip()
        return columns


@dataclass(frozen=True)
class BoxOptions(TableOptions):
    """Options on boxes of images, and on the columns of a table of images."""

    box_source: Annotated[
        Path | None,
        "PATH",
        "Use boxes of the images: a folder of YOLO's .txt files or of Pascal VOC's .xml files, or a file of COCO, "
        "MegaDetector or SpeciesNet.",
        partial(require_path, expected="a folder of .txt files or a .json file"),
    ] = None
    box_margin: Annotated[
        float | None, "SHARE", "Margin on each side of a box, as a share of its width or height. Default: 0."
    ] = None
    box_confidence: Annotated[
        float | None, "NUMBER", "Minimum confidence of a detected box, 0 to 1; others are left out. Default: 0.2."
    ] = None

    def read(self, where: str | None = None) -> "Boxes | None":
        """Return the options, with conditions on rows; None without any, for which nothing is imported."""
        if where is None and self == BoxOptions():
            return None
        from dmlkit.datasets.files.boxes import Boxes

        boxes = Boxes(
            self.box_source,
            self.box_margin or 0.0,
            self.box_confidence,
            columns=self.columns(),
            root=self.root,
            where=where_of(where),
        )
        boxes.check()
        return boxes


@dataclass(frozen=True)
class SourceOptions:
    """Options of a command that reads any points."""

    split: RunSplit = None
    overrides: SetDataset = None
    labels: ArrayLabels = None
    manifold: ArrayManifold = None
    device: RunDevice = None
    where: Conditions = None

    def open(self, source: Path) -> "PointSet":
        """Open points with a progress bar, see `open_points`."""
        from dmlkit.gallery.sources import open_points
        from dmlkit.vectors.fusion import ModelChoice

        return open_points(
            source,
            split=self.split,
            overrides=self.overrides or [],
            labels=self.labels,
            manifold=self.manifold,
            where=where_of(self.where),
            model=ModelChoice(device=self.device),
            bar=bars(),
        )


@dataclass(frozen=True)
class ModelOptions:
    """Options on the model that embeds new images."""

    run: Annotated[
        Path | None, "RUN", "Run that embeds new images. Default: the one that embedded the others.", require_run
    ] = None
    device: ModelDevice = "auto"

    def check_device(self, *paths: Path) -> None:
        """Raise a `UserError` for ``--device`` where no network computes: every path holds points already."""
        kinds: list[Kind] = [kind_of(path) for path in paths]
        if self.device != "auto" and "run" not in kinds and "images" not in kinds:
            check_options(paths[-1], kinds[-1], {"--device": self.device})


@dataclass(frozen=True)
class FusedModelOptions(ModelOptions):
    """Options on the model that embeds new images, and on a second one."""

    second: Annotated[
        Path | None,
        "RUN",
        "Add the similarity of a second run of the same dataset, weighted by validation classes.",
        second_run(),
    ] = None

    def choose(self, source: Path, *asked: Path) -> "ModelChoice":
        """Return the model for what is compared with a source, and print the weight of a second one."""
        if asked:
            self.check_device(source, *asked)

        from dmlkit.evaluation.second import fusion_of
        from dmlkit.vectors.fusion import ModelChoice

        fusion = fusion_of(source, self.second, device=self.device, bar=bars())
        if fusion is not None:
            say(fusion_line(fusion.model_dump()))
        return ModelChoice(self.run, fusion=fusion, device=self.device)


@dataclass(frozen=True)
class MovedModelOptions(FusedModelOptions):
    """Options on the runs of a gallery, which may have moved."""

    run: Annotated[Path | None, "RUN", "The gallery's run, if it has moved.", require_run] = None
    second: Annotated[Path | None, "RUN", "The gallery's second run, if it has moved.", second_run()] = None
