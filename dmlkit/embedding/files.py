"""From parts to the files of embeddings that other programs read."""

from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from numpy.lib import format as npy

from dmlkit.datasets.files.dataset import Dataset
from dmlkit.embedding.manifest import Checksums, Description, Manifest, file_checksum
from dmlkit.embedding.parts import PartFolder
from dmlkit.files.atomic import atomic_write
from dmlkit.loading.faults import refuse_nothing_read
from dmlkit.run_folder.threshold import Threshold


def write_embeddings(
    parts: PartFolder,
    dataset: Dataset,
    description: Description,
    *,
    source: str,
    labelled: bool,
    threshold: Threshold | None = None,
) -> Manifest:
    """Write ``embeddings.npy``, ``items.parquet`` and, last, ``manifest.json`` from all parts, one in memory at a time.

    Until the manifest is there this may be done again, also by another process at the same time.

    Args:
        parts: all complete; they stay.
        dataset: the images.
        description: of the model.
        source: what the images are.
        labelled: the dataset's labels mean something; otherwise the label column is null.
        threshold: of the model, if it was calibrated.

    Returns:
        The manifest.

    Raises:
        UserError: no image could be read.
    """
    output, faults = parts.output, list[str]()
    with atomic_write(output / "embeddings.npy", scratch=parts.path) as partial, partial.open("wb") as file:
        count = points_checksum = 0
        _write_header(file, count, description.dim)
        for part in parts.read():
            content = np.ascontiguousarray(part.points.numpy(), dtype="<f4").tobytes()
            points_checksum = crc32(content, points_checksum)
            file.write(content)
            faults += part.faults
            count += len(part.indices)
        if faults and not count:
            parts.discard()  # the same command shall not go on with them once the images are mended
            refuse_nothing_read(count, faults, source)
        _write_header(file, count, description.dim)
    _write_items(output / "items.parquet", parts, dataset, labelled=labelled)
    manifest = Manifest(
        **dict(description),
        source=source,
        count=count,
        skipped=tuple(faults),
        threshold=threshold,
        checksums=Checksums(points=points_checksum, items=file_checksum(output / "items.parquet")),
    )
    manifest.write(output / "manifest.json", scratch=parts.path)
    return manifest


def _write_header(file: Any, count: int, dim: int) -> None:
    """Write the header of a (count, dim) float32 array at the start, of the same length for every count."""
    file.seek(0)
    npy.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (count, dim)})


def _write_items(path: Path, parts: PartFolder, dataset: Dataset, *, labelled: bool) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    schema = pa.schema([("id", pa.int64()), ("path", pa.string()), ("label", pa.string())])
    names = dataset.class_names
    written = 0
    with (
        atomic_write(path, scratch=parts.path) as partial,
        parquet.ParquetWriter(partial, schema) as writer,
    ):
        for part in parts.read():
            indices = part.indices.tolist()
            labels = [names[label] if labelled else None for label in dataset.labels[part.indices].tolist()]
            ids = range(written, written + len(indices))
            rows = [list(ids), [dataset.paths[index] for index in indices], labels]
            writer.write_table(pa.table(rows, schema=schema))
            written = ids.stop
