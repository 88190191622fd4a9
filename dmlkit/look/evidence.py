"""How much of retrieval comes from outside the objects: metrics of images whose inside or outside is painted over."""

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from dmlkit.datasets.base import DatasetConfig, Split
from dmlkit.datasets.files.dataset import Dataset, PickedSamples, evenly_spread
from dmlkit.datasets.files.image import read_image
from dmlkit.datasets.table import TableConfig, other_table
from dmlkit.distributed.launch import Ranks
from dmlkit.errors import UserError
from dmlkit.evaluation.by_value import absolute, listed_paths
from dmlkit.evaluation.evaluate import score_dataset
from dmlkit.evaluation.report import Evidence
from dmlkit.evaluation.run import EvaluatedRun
from dmlkit.files.columns import LABEL
from dmlkit.files.csv_table import own_column
from dmlkit.files.image_table import read_images
from dmlkit.files.outputs import BOX
from dmlkit.loading.inputs import Inputs, inputs_of
from dmlkit.metrics.base import MetricConfig
from dmlkit.metrics.scoring import metric_configs
from dmlkit.metrics.statistics import ratio_interval
from dmlkit.run_folder.folder import RunFolder
from dmlkit.vectors.in_memory import Embeddings
from dmlkit.vectors.progress_bar import Bar, no_bar
from dmlkit.vectors.stored import split_embeddings
from dmlkit.vectors.trained import TrainedModel, load_model

CENTER = "center"
"""Instead of a table of regions: a square in the middle with half of the area of what the model sees."""
MASK = "mask"  # column of a table
BATCH = 64
FOR_COLOR = 256  # images whose mean color is painted: one color for all, since one each would tell images apart


def run_evidence(path: Path, run: EvaluatedRun, regions: str, *, ranks: Ranks, bar: Bar = no_bar) -> Evidence:
    """Measure the evidence of a run, evaluated on its own dataset, for its last metric with a value per query."""
    if ranks.world_size > 1:
        raise UserError(f"--evidence {regions}: runs in one process, got {ranks.world_size}; start it without ranks")
    if not run.per_query:
        raise UserError("--evidence: none of the metrics has a value per query; add one with --metric, e.g. map@r")
    folder = RunFolder(path)
    trained = load_model(folder, ranks, run.checkpoint)
    split = cast(Split, run.report.split)
    trained.recipe.dataset.require_one_label(f"--evidence {regions}")
    dataset = trained.recipe.dataset.searched(split)
    embeddings = split_embeddings(folder, trained, ranks, dataset, split, bar=bar)
    return evidence_of(trained, dataset, embeddings, list(run.per_query)[-1], regions, bar=bar)


def evidence_of(
    trained: TrainedModel, dataset: Dataset, embeddings: Embeddings, metric: str, regions: str, *, bar: Bar = no_bar
) -> Evidence:
    r"""Measure how much of a retrieval metric comes from outside of regions.

    Let v(S) be the metric when all images, queries and gallery, show the pixels in S alone and the others have the mean
    color of all images, where v(in, out) is the metric itself and v() that of a random order. The share of the outside
    is its Shapley value (Shapley 1953) for these two players, relative to the sum of both values:

    .. math:: \frac{\frac12 (v(\text{out}) - v()) + \frac12 (v(\text{in, out}) - v(\text{in}))}{v(\text{in, out}) - v()}

    It is 0 if the outside has no influence, 1 if the inside has none, 1/2 if either suffices, and negative if the
    outside misleads. Painted images are unlike those of the training: if the network recognizes neither part for that
    reason, the share is 1/2 too.

    Args:
        regions: ``center``, or the path of a table with the columns ``path`` and ``x1 y1 x2 y2``, ``x y width height``
            (several rows of an image are united) or ``mask``, an image whose pixels that are not black are the inside.
            Paths are relative to the table.
    """
    if not trained.samples.has_pixels:
        raise UserError(f"--evidence {regions}: looks at regions of images, got {trained.samples.name}s; leave it out")
    shown_inside, shown_outside, area = _parts(trained, dataset, embeddings.indices, regions, bar)
    constant = embeddings.points[:1].expand_as(embeddings.points).contiguous()
    configs: list[MetricConfig] = metric_configs([metric])

    def per_query(points: Tensor) -> tuple[Tensor, Tensor]:
        evaluation = score_dataset(embeddings._replace(points=points), dataset, trained.manifold, configs)
        return evaluation.scores.per_query[metric].double(), evaluation.labels

    compared = (embeddings.points, shown_inside, shown_outside, constant)
    (whole, classes), (inside, _), (outside, _), (chance, _) = map(per_query, compared)
    gain = whole - chance
    share = None
    if float(gain.sum()) > 0:
        share = ratio_interval(((outside - chance) + (whole - inside)) / 2, gain, classes)
    return Evidence(
        metric=metric,
        regions=regions,
        area=area,
        whole=float(whole.mean()),
        inside=float(inside.mean()),
        outside=float(outside.mean()),
        chance=float(chance.mean()),
        share=share and share.mean,
        interval=share and share.ends,
    )


@torch.no_grad()
def _parts(
    trained: TrainedModel, dataset: Dataset, rows: Tensor, regions: str, bar: Bar
) -> tuple[Tensor, Tensor, float]:
    """Embed the images of some rows with either side of their regions painted over.

    Returns:
        Points (n, D) of images that show the inside of their regions alone, and the outside, and the mean share of the
        pixels outside.
    """
    images, read = inputs_of(dataset, trained.recipe.transform, training=False), None
    if regions != CENTER:
        masks = RegionMasks(dataset, rows, read_regions(Path(regions), trained.recipe.dataset, dataset, rows))
        read = inputs_of(masks, trained.recipe.transform, training=False)
    colors = [_input(images, row).double().mean((1, 2)) for row in evenly_spread(rows, FOR_COLOR).tolist()]
    color = torch.stack(colors).mean(0).round().to(torch.uint8)[:, None, None]
    points: tuple[list[Tensor], list[Tensor]] = [], []
    area = 0.0
    with bar("painting images", len(rows)) as advance:
        for positions in torch.arange(len(rows)).split(BATCH):
            shown = torch.stack([_input(images, int(rows[position])) for position in positions])
            if read is None:
                inside, side = torch.zeros_like(shown[:, :1], dtype=torch.bool), shown.shape[-1]
                margin = round(side * (1 - 0.5**0.5) / 2)
                inside[..., margin : side - margin, margin : side - margin] = True
            else:
                inside = torch.stack([_input(read, int(position)) for position in positions])[:, :1] > 127
            area += float((~inside).float().mean((1, 2, 3)).sum())
            for embedded, mask in zip(points, (inside, ~inside), strict=True):
                embedded.append(trained.model(torch.where(mask, shown, color).to(trained.device)).float().cpu())
            advance(len(positions))
    return torch.cat(points[0]), torch.cat(points[1]), area / len(rows)


def _input(images: Inputs, row: int) -> Tensor:
    item = images[row, 0]
    if not isinstance(item.input, Tensor):
        raise UserError(f"--evidence: an image can no longer be read: {item.fault}")
    return item.input


class RegionMasks(PickedSamples):
    """Masks of images, of the same sizes: 255 inside of a region and 0 outside.

    Args:
        regions: returns the mask (H, W) bool of an image by its position and the size of the image.
    """

    def __init__(self, dataset: Dataset, rows: Tensor, regions: Callable[[int, int, int], Tensor]) -> None:
        super().__init__(dataset, rows, dataset.labels[rows])
        self.regions = regions

    def sample(self, index: int) -> Tensor:
        _, height, width = super().sample(index).shape
        return self.regions(index, height, width).to(torch.uint8).mul(255).expand(3, -1, -1).contiguous()


def read_regions(
    table: Path, config: DatasetConfig, dataset: Dataset, rows: Tensor
) -> Callable[[int, int, int], Tensor]:
    """Read the boxes or masks of images of a dataset, whose table may name the columns, see `other_table`.

    Returns:
        Function of the position of an image in ``rows`` and of its height and width: its mask (H, W) bool.
    """
    option = f"--evidence {table}"
    if any(dataset.box(row) is not None for row in rows.tolist()):
        raise UserError(f"{option}: the images of this run are cropped to boxes; use --evidence {CENTER}")
    other = other_table(table, config if isinstance(config, TableConfig) else None)
    root = None if other.root is None else Path(other.root)
    named = {name: text for name, text in other.columns.items() if text and name != LABEL}  # "" may leave out the boxes
    listed = read_images(table, root, named, ("path",), prints_columns=False)
    regions, root = listed.table, listed.root
    has_boxes = BOX[0] in regions.column_names
    mask = "" if has_boxes else regions.column_names[own_column(regions.column_names, MASK, str(table))]
    names = listed_paths(listed)
    columns = zip(*(regions[name].to_pylist() for name in (BOX if has_boxes else (mask,))), strict=True)
    by_path: defaultdict[str, list[tuple[Any, ...]]] = defaultdict(list)
    for name, value in zip(names, columns, strict=True):
        for key in {name, absolute(root / name)} if None not in value else ():
            by_path[key].append(value)
    of_row: list[list[tuple[Any, ...]]] = []
    for row in rows.tolist():
        path = str(dataset.paths[row])
        image_regions = by_path.get(path) or by_path.get(absolute(path))
        if image_regions is None:
            raise UserError(f"{option}: has no {'box' if has_boxes else MASK} of {path}; add a row with this path")
        of_row.append([_box(option, path, box) for box in image_regions] if has_boxes else image_regions)

    def mask_of(index: int, height: int, width: int) -> Tensor:
        inside = torch.zeros(height, width, dtype=torch.bool)
        for region in of_row[index]:
            if has_boxes:
                left, top, right, bottom = (max(side, 0) for side in region)
                inside[top:bottom, left:right] = True
                continue
            drawn = read_image(str(root / str(region[0]))).amax(0) > 0
            if drawn.shape != inside.shape:
                sizes = " x ".join(map(str, drawn.shape[::-1]))
                raise UserError(
                    f"{option}: the mask {region[0]} has {sizes} pixels, but its image has {width} x {height}"
                )
            inside |= drawn
        return inside

    return mask_of


def _box(option: str, path: str, sides: tuple[float, ...]) -> tuple[int, ...]:
    """Return the sides of a box in pixels."""
    try:
        left, top, right, bottom = (round(side) for side in sides)
    except (ValueError, OverflowError):  # nan or infinite
        left = top = right = bottom = 0
    if not (left < right and top < bottom):
        values = ", ".join(f"{side:g}" for side in sides)
        raise UserError(f"{option}: the box {values} of {path}: expected numbers x1 < x2 and y1 < y2, in pixels")
    return left, top, right, bottom
