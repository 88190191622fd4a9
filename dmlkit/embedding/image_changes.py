"""Differences of two lists of images, in words."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dmlkit.datasets.files.dataset import Dataset
from dmlkit.loading.cache import stamp

OTHER_LIST = "another list of images"


def describe_changes(before: Mapping[str, object], after: Mapping[str, object]) -> str:
    """Return how many images were added, removed and changed, and the first of each.

    Args:
        before: what was known of each image, by its path.
        after: what is known of it now.

    Example:
        >>> describe_changes({"a.jpg": 1, "b.jpg": 2}, {"a.jpg": 3, "c.jpg": 4, "d.jpg": 5})
        '2 images added, e.g. c.jpg; 1 image removed: b.jpg; 1 image changed: a.jpg'
    """
    kinds = {
        "added": [path for path in after if path not in before],
        "removed": [path for path in before if path not in after],
        "changed": [path for path, known in after.items() if path in before and before[path] != known],
    }
    parts = [
        f"1 image {kind}: {paths[0]}" if len(paths) == 1 else f"{len(paths)} images {kind}, e.g. {paths[0]}"
        for kind, paths in kinds.items()
        if paths
    ]
    return "; ".join(parts) or OTHER_LIST


def changes_since(items: Path, dataset: Dataset) -> str:
    """Return how a dataset differs from the images of stored embeddings, as far as their file names them.

    Args:
        items: ``items.parquet`` of the embeddings; it may be missing or damaged.
        dataset: the images of now.
    """
    import pyarrow as pa
    from pyarrow import parquet

    try:
        table: Any = parquet.read_table(items)
        rows: dict[str, list[Any]] = {name: table[name].to_pylist() for name in table.column_names}
        stored = [rows[name] for name in ("label", "bytes", "modified") if name in rows]
        before = dict(zip(rows["path"], zip(*stored, strict=True), strict=True))
    except (OSError, KeyError, pa.ArrowException):
        return OTHER_LIST
    labeled = zip(dataset.paths, dataset.label_names(dataset.labels), strict=True)
    return describe_changes(
        before, {path: (label, *(stamp(path) if len(stored) > 1 else ())) for path, label in labeled}
    )
