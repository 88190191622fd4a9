"""The data of the page's script: a map of all images with some thumbnails, and the table of classes."""

import base64
import json
from typing import Any

import torch
from torch import Tensor

from dmlkit.embedding.in_memory import Bar, no_bar
from dmlkit.evaluation.result import Evaluation, confusions
from dmlkit.files.escape import printable
from dmlkit.training.inspection.findings import ModelInspection

GRID = 4095  # places along the longer side of a map
MOST_PICTURES = 1500  # thumbnails of the map: 4 MB, whatever the number of images
SIDE = 64  # of such a thumbnail


def page_data(found: ModelInspection, *, seed: int = 0, bar: Bar = no_bar) -> tuple[dict[str, Any], int]:
    """What the script reads, and how many of the map's thumbnails could not be made.

    Args:
        found: all that is known.
        seed: of the sample that gets thumbnails.
        bar: shows how many are made.
    """
    images = found.collection
    generator = torch.Generator().manual_seed(seed)
    sample = torch.randperm(len(images), generator=generator)[:MOST_PICTURES].sort().values.tolist()
    pictures: dict[str, str] = {}
    with bar("drawing", len(sample)) as advance:
        for row in sample:
            small = images.picture(row, SIDE)
            if small is not None:
                pictures[str(row)] = base64.b64encode(small).decode()
            advance(1)
    data = {
        "planes": {name: (in_disk if name == "disk" else on_grid)(plane) for name, plane in found.planes.items()},
        "labels": found.labels.tolist(),
        "names": [printable(name) for name in found.names],
        "paths": [printable(path) for path in images.short_paths],
        "pictures": pictures,
        "classes": class_rows(found),
    }
    return data, len(sample) - len(pictures)


def class_rows(found: ModelInspection) -> dict[str, Any]:
    """The table of classes: a header, and a row of each, the worst first by the last of the metrics."""
    evaluation = found.evaluation
    if evaluation is None or not evaluation.scores.per_query:
        return {"head": [], "rows": []}
    taken = _taken_for(evaluation)
    rows = [
        [printable(evaluation.class_names[score.label]), score.queries]
        + [round(value, 4) for value in score.metrics.values()]
        + [taken.get(score.label, "")]
        for score in evaluation.class_scores()
    ]
    return {"head": ["class", "queries", *evaluation.scores.per_query, "most taken for"], "rows": rows}


def on_grid(plane: Tensor) -> list[list[int]]:
    """Coordinates (N, 2) as two lists of whole numbers from 0 to `GRID`, at one scale.

    Example:
        >>> on_grid(torch.tensor([[0.0, 1.0], [2.0, 2.0]]))
        [[0, 4095], [0, 2048]]
    """
    low = plane.min(0).values
    span = float((plane.max(0).values - low).max()) or 1.0
    return ((plane - low) / span * GRID).round().long().T.tolist()


def in_disk(plane: Tensor) -> list[list[int]]:
    """Coordinates (N, 2) in the unit disk as whole numbers: the disk fills the square from 0 to `GRID`.

    Example:
        >>> in_disk(torch.tensor([[-1.0, 0.0], [0.0, 1.0]]))
        [[0, 2048], [2048, 4095]]
    """
    return ((plane + 1) / 2 * GRID).round().long().T.tolist()


def as_json(data: dict[str, Any]) -> str:
    r"""JSON for an element of HTML, which nothing in it can end.

    Example:
        >>> as_json({"name": "</script>"})
        '{"name":"\\u003c/script>"}'
    """
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


def _taken_for(evaluation: Evaluation) -> dict[int, str]:
    """By class the other that most of its queries' nearest are of, with their number."""
    most: dict[int, str] = {}
    for pair in confusions(evaluation.labels, evaluation.nearest_labels):
        most.setdefault(pair.label, f"{printable(evaluation.class_names[pair.taken_for])} ({pair.queries})")
    return most
