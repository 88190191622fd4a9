"""Embedding of images into a folder for other programs: in one process, on torchrun's ranks, or on a Ray cluster."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from time import sleep
from typing import Any, Literal
from zlib import crc32

import numpy as np
from numpy.lib import format as npy

from dmlkit.datasets.files.table_file import BOX
from dmlkit.distributed.launch import Ranks, count_ranks
from dmlkit.embedding.job import Compute, EmbedJob
from dmlkit.embedding.manifest import Checksums, Description, Manifest, RunPlace
from dmlkit.embedding.parts import Part, PartFolder
from dmlkit.embedding.progress_bar import Advance
from dmlkit.embedding.trained import TrainedModel, describe
from dmlkit.errors import UserError
from dmlkit.files.atomic import atomic_write
from dmlkit.files.regular import file_checksum
from dmlkit.loading.inputs import refuse_nothing_read

Engine = Literal["local", "torchrun", "ray"]


def choose_engine(engine: Engine | None) -> Engine:
    """Return the requested engine; by default torchrun's ranks if there are several, otherwise this process.

    Raises:
        UserError: the program was not started as the engine needs it.
    """
    ranks = count_ranks()[0]
    if engine is None:
        return "torchrun" if ranks > 1 else "local"
    if engine == "torchrun" and "WORLD_SIZE" not in os.environ:
        raise UserError(
            "--engine torchrun: torchrun did not start this process; use torchrun --nproc-per-node=N -m dmlkit embed "
            "..., where N is the number of GPUs"
        )
    if engine != "torchrun" and ranks > 1:
        raise UserError(
            f"--engine {engine}: torchrun has started {ranks} processes; remove --engine, or use dmlkit embed without "
            "torchrun"
        )
    return engine


def embed_job(
    job: EmbedJob,
    trained: TrainedModel,
    fabric: Ranks,
    compute: Compute,
    *,
    advance: Advance,
    say: Callable[[str], None] = lambda _: None,
) -> Manifest | None:
    """Embed images into ``embeddings.npy``, ``items.parquet`` and ``manifest.json``, in bounded memory.

    The work is done in parts, which are kept when it is stopped: the same call resumes. Each rank computes an equal
    share of the missing parts; the first rank puts them all together.

    Args:
        job: images to embed, and the output.
        trained: the model.
        fabric: the ranks.
        compute: computes the share of a rank.
        advance: called with the number of images of every batch, on the first rank.
        say: called with a message about parts that were complete already.

    Returns:
        The manifest, on the first rank; None on others.

    Raises:
        UserError: the folder has embeddings or parts of another job, the disk is full, or an image cannot be read.
    """
    parts, skip, description = job.parts, job.skip_bad_images, job.describe(trained)
    missing: list[int] = []
    if fabric.is_global_zero:
        parts.begin(description)
        missing = parts.missing(range(len(parts)), description["dim"], skip_bad_images=skip)
    # one answer for all: a rank that looked for itself, later, would not see parts that a quick one has just written
    missing = fabric.broadcast(missing)
    parts.check(description)
    if len(missing) < len(parts):
        say(f"{len(parts) - len(missing)} of {len(parts)} parts were complete already")
    remaining = sum(len(parts.images(part)) for part in missing)
    advance(len(job.dataset) - remaining)
    share = missing[fabric.global_rank :: fabric.world_size]
    try:
        compute(share, _scaled(advance, sum(len(parts.images(part)) for part in share), remaining))
        if not fabric.is_global_zero:
            return None
        _wait(parts, missing, description["dim"], fabric, skip_bad_images=skip)
        return write_embeddings(job, describe(trained), parts.read, scratch=parts.path)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and parts.is_finished():
            raise UserError(
                f"{job.output}: another dmlkit embed process has just finished this folder; use its embeddings"
            ) from None
        raise UserError(
            f"{error.filename or job.output}: {error.strerror or error}; finished parts are kept; fix the problem and "
            f"{job.again} to resume"
        ) from error
    finally:
        if fabric.is_global_zero:
            parts.leave()


def _scaled(advance: Advance, share: int, whole: int) -> Advance:
    """Report the progress of this rank as progress of all."""
    done = 0

    def report(images: int) -> None:
        nonlocal done
        advance((done + images) * whole // share - done * whole // share)
        done += images

    return report


def _wait(parts: PartFolder, missing: list[int], dim: int, fabric: Ranks, *, skip_bad_images: bool) -> None:
    """Wait until other ranks have written their parts.

    A barrier would time out after 30 minutes, and ranks of unequal speed can be further apart than that; if one of
    them dies, torchrun ends this one too."""
    while missing := parts.missing(missing, dim, skip_bad_images=skip_bad_images):
        if fabric.world_size == 1:
            raise UserError(
                f"{parts.file(missing[0])}: missing, although a worker has written it; --output must be a folder "
                "that all workers can reach under the same path"
            )
        sleep(0.5)


def write_embeddings(
    job: EmbedJob, description: Description, read: Callable[[], Iterable[Part]], *, scratch: Path
) -> Manifest:
    """Write ``embeddings.npy``, ``items.parquet`` and, last, ``manifest.json`` from all parts, one in memory at a time.

    Until the manifest exists this may be repeated, also by another process at the same time.

    Args:
        job: the images and the output.
        description: description of the model.
        read: returns all parts in the order of the images; they are kept.
        scratch: folder on the file system of the output, for temporary files.

    Returns:
        The manifest.

    Raises:
        UserError: no image could be read.
    """
    output, faults, devices = job.output, list[str](), set[str]()
    was_read = np.zeros(len(job.dataset), dtype=bool)
    with atomic_write(output / "embeddings.npy", scratch=scratch) as partial, partial.open("wb") as file:
        count = points_checksum = 0
        _write_header(file, count, description.dim)
        for part in read():
            content = np.ascontiguousarray(part.points.numpy(), dtype="<f4").tobytes()
            points_checksum = crc32(content, points_checksum)
            file.write(content)
            faults += part.faults
            count += len(part.indices)
            was_read[part.indices.numpy()] = True
            devices.add(part.device)
        if faults and not count:
            job.parts.discard()  # the same command shall not go on with them once the images are fixed
            refuse_nothing_read(count, faults, job.source)
        _write_header(file, count, description.dim)
    _write_items(output / "items.parquet", job, read, scratch=scratch)
    split = None
    if job.split is not None:
        found = {"device": "+".join(sorted(devices)), "omitted": tuple(np.flatnonzero(~was_read).tolist())}
        split = job.split.model_copy(update=found)
    manifest = Manifest(
        **dict(description),
        source=job.source,
        count=count,
        skipped=tuple(faults),
        threshold=job.threshold,
        run=None if job.run is None else RunPlace.of(job.run, output),
        checksums=Checksums(points=points_checksum, items=file_checksum(output / "items.parquet")),
        split=split,
    )
    manifest.write(output / "manifest.json", scratch=scratch)
    return manifest


def _write_header(file: Any, count: int, dim: int) -> None:
    """Write the header of a (count, dim) float32 array at the start, of the same length for every count."""
    file.seek(0)
    npy.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (count, dim)})


def _write_items(path: Path, job: EmbedJob, read: Callable[[], Iterable[Part]], *, scratch: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    dataset, written = job.dataset, 0
    columns: list[tuple[str, Any]] = [("id", pa.int64()), ("path", pa.string()), ("label", pa.string())]
    columns += [(name, pa.float64()) for name in BOX] if dataset.boxes is not None else []
    columns += [("bytes", pa.int64()), ("modified", pa.int64())] if any(job.stamps) else []
    schema = pa.schema(columns)
    with (
        atomic_write(path, scratch=scratch) as partial,
        parquet.ParquetWriter(partial, schema) as writer,
    ):
        for part in read():
            indices = part.indices.tolist()
            labels = dataset.label_names(dataset.labels[part.indices])
            ids = range(written, written + len(indices))
            rows: list[Any] = [list(ids), [dataset.paths[index] for index in indices], labels]
            if dataset.boxes is not None:
                rows += [pa.array(sides, from_pandas=True) for sides in dataset.boxes[indices].T]  # NaN becomes null
            if any(job.stamps):
                stamps = [job.stamps[index] or (None, None) for index in indices]
                rows += [[size for size, _ in stamps], [modified for _, modified in stamps]]
            writer.write_table(pa.table(rows, schema=schema))
            written = ids.stop
