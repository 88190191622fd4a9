"""Parts of embeddings on disk while any number of processes compute them: each is complete, or does not exist."""

import json
import os
from collections.abc import Container, Iterable, Iterator
from contextlib import suppress
from errno import ENOENT
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from dmlkit.errors import UserError
from dmlkit.files.atomic import atomic_write, is_partial, json_text, write_text
from dmlkit.files.document import differences
from dmlkit.files.outputs import EMBEDDING_FILES
from dmlkit.files.regular import check_regular
from dmlkit.loading.inputs import Draw

BATCH_IMAGES = 128  # for so few the start of loader processes takes longer than the images
PART_IMAGES = 64 * BATCH_IMAGES  # at most: 17 MB at 512 dimensions, and what a kill can cost
HASHES = {("list", "hash"): "another list of images", ("model", "fingerprint"): "other weights"}
"""Keys of a job whose values are hashes, and what a difference means."""
PART = "part-*.safetensors"  # the name of a complete part
PARTS = 64  # at least, where there are batches for so many: short lists keep 8 GPUs evenly busy too


class Part(NamedTuple):
    """Embeddings of consecutive images of a list."""

    points: Tensor  # (n, D) float32
    indices: Tensor  # (n,) int64, into the list
    faults: list[str]  # one message per image that could not be read
    device: str = ""  # kind of the device that computed it
    local: Tensor | None = None  # (n, P, C) float16, local features, if they are asked for


class PartFolder:
    """The folder ``parts`` inside the folder of the embeddings: ``job.json`` and ``part-00000.safetensors``...

    A part gets its name when it is complete, so it does not matter who computes it, how often, or which process dies.
    Parts are cut by the length of the list alone, and at whole batches: however many processes share the work,
    every image is in the same batch and its embedding the same to the bit.
    """

    def __init__(self, output: Path, count: int) -> None:
        self.output, self.count = output, count
        self.path = output / "parts"
        self.job_path = self.path / "job.json"
        self.part_images = min(PART_IMAGES, BATCH_IMAGES * max(1, -(-count // (PARTS * BATCH_IMAGES))))

    def __len__(self) -> int:
        return -(-self.count // self.part_images)

    def images(self, part: int) -> range:
        """Return the images of a part."""
        return range(part * self.part_images, min((part + 1) * self.part_images, self.count))

    def batches(self, part: int, known: Container[int] = ()) -> list[list[Draw]]:
        """Return the batches in which a part is computed, without images whose points are known."""
        draws = [(index, 0) for index in self.images(part) if index not in known]
        return [draws[start : start + BATCH_IMAGES] for start in range(0, len(draws), BATCH_IMAGES)]

    def file(self, part: int) -> Path:
        """Return the path of a part, where it is once it is complete."""
        return self.path / f"part-{part:05}.safetensors"

    def begin(self, job: dict[str, Any]) -> None:
        """Start a job in this folder, or resume it; one process does this before the others call `check`.

        Args:
            job: plain data that the parts depend on.

        Raises:
            UserError: the folder has embeddings already, or files of another program, or cannot be written.
        """
        if self.is_finished():
            self.leave()
        taken = [*(name for name in map(self.output.joinpath, EMBEDDING_FILES) if name.exists()), *self.path.glob(PART)]
        if taken and not self.job_path.exists():
            raise UserError(f"{self.output}: has {taken[0].name} already; choose another --output, or remove it")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if not self.job_path.exists():
                write_text(self.job_path, json_text(job), scratch=self.path)
        except OSError as error:
            raise UserError(f"{self.output}: cannot write embeddings here: {error.strerror}") from error
        self.check(job)

    def check(self, job: dict[str, Any]) -> None:
        """Raise an error unless the parts here belong to this job.

        Raises:
            UserError: this process cannot see the folder, or it belongs to another job; the differences are listed.
        """
        try:
            check_regular(self.job_path)
            started = json.loads(self.job_path.read_text(encoding="utf-8"))
            if not isinstance(started, dict):
                raise ValueError(f"expected a description of the embeddings, got a {type(started).__name__}")
        except FileNotFoundError:
            if self.is_finished():  # the first rank needed no part of this one, and was quicker
                return
            raise UserError(
                f"{self.job_path}: not found by a process; --output must be a folder that all processes can reach"
            ) from None
        except (OSError, ValueError) as error:
            raise UserError(f"{self.job_path}: cannot read it: {error}; remove {self.path} to start again") from None
        changes = _changes(started, json.loads(json.dumps(job)))
        if changes:
            raise UserError(
                f"{self.output}: contains parts with other settings ({'; '.join(changes)}); undo this change to "
                f"resume, remove {self.path} to start again, or choose another --output"
            )

    def missing(self, parts: Iterable[int], dim: int, *, skip_bad_images: bool) -> list[int]:
        """Return the parts that are still to be computed, including those that do not match the request.

        Args:
            skip_bad_images: accept parts that left images out.
        """
        contents = ((part, self._content(part)) for part in parts)
        return [
            part
            for part, content in contents
            if content is None
            or (content.faults and not skip_bad_images)
            or not is_part_of(content, self.images(part), dim)
        ]

    def _content(self, part: int) -> Part | None:
        """Return a part as stored on disk; None if there is no valid part."""
        path = self.file(part)
        try:
            check_regular(path)
            with safe_open(path, "pt") as file:
                metadata = file.metadata()
                faults: Any = json.loads(metadata["faults"])
                device = metadata.get("device", "")
                local = file.get_tensor("local") if "local" in file.keys() else None  # noqa: SIM118 - no mapping
                content = Part(file.get_tensor("points"), file.get_tensor("indices"), faults, device, local)
        # not there | damaged | no metadata | others | no JSON
        except (OSError, SafetensorError, TypeError, KeyError, ValueError):
            return None
        is_texts = isinstance(faults, list) and all(isinstance(fault, str) for fault in faults)
        return content if is_texts else None

    def write(self, part: int, content: Part) -> None:
        """Write a part, all or nothing."""
        with atomic_write(self.file(part), scratch=self.path) as partial:
            tensors = {"points": content.points, "indices": content.indices}
            tensors |= {} if content.local is None else {"local": content.local.contiguous()}
            metadata = {"faults": json.dumps(content.faults), "device": content.device}
            partial.write_bytes(save(tensors, metadata))

    def read(self) -> Iterator[Part]:
        """Yield all parts in the order of the list, one in memory at a time; none may be `missing`.

        Raises:
            FileNotFoundError: another process has finished the embeddings and removed a part.
        """
        for part in range(len(self)):
            content = self._content(part)
            if content is None:
                raise FileNotFoundError(ENOENT, os.strerror(ENOENT), str(self.file(part)))
            yield content

    def complete(self, dim: int) -> Iterator[Part]:
        """Yield those parts that are complete, in the order of the list, one in memory at a time."""
        for part in range(len(self)):
            content = self._content(part)
            if content is not None and is_part_of(content, self.images(part), dim):
                yield content

    def is_finished(self) -> bool:
        """Return whether the embeddings are complete: their manifest is written last."""
        return (self.output / "manifest.json").exists()

    def leave(self) -> None:
        """Remove what nobody resumes: the parts of finished embeddings, or a job without a complete part."""
        if not self.job_path.exists() or not (self.is_finished() or not any(self.path.glob(PART))):
            return
        self.discard()

    def discard(self) -> None:
        """Remove the job and its parts."""
        for path in (*self.path.glob(PART), *filter(is_partial, self.path.glob(".*"))):
            path.unlink(missing_ok=True)
        self.job_path.unlink(missing_ok=True)  # last: without it the folder may be somebody else's
        with suppress(OSError):
            self.path.rmdir()


def is_part_of(part: Part, images: range, dim: int) -> bool:
    """Return whether a part has each of some images once, in order, as an embedding or as a fault.

    Example:
        >>> part = Part(torch.zeros(2, 3), torch.tensor([4, 6]), ["5.jpg: cannot read this image"])
        >>> is_part_of(part, range(4, 7), 3), is_part_of(part, range(4, 8), 3), is_part_of(part, range(4, 7), 2)
        (True, False, False)
    """
    points, indices, faults, _, local = part
    return (
        points.dtype == torch.float32
        and indices.dtype == torch.int64
        and indices.ndim == 1
        and points.shape == (len(indices), dim)
        and len(indices) + len(faults) == len(images)
        and all(index in images for index in indices.tolist())
        and bool((indices.diff() > 0).all())
        and bool(points.isfinite().all())
        and (local is None or len(local) == len(indices))
    )


def _changes(started: dict[str, Any], job: dict[str, Any]) -> list[str]:
    """Return the differences of two jobs, with hashes in words."""
    changes: list[str] = []
    for (group, key), text in HASHES.items():
        pair = [one[group] for one in (started, job) if isinstance(one.get(group), dict)]
        hashes = [one.pop(key, None) for one in pair]
        if len(pair) == 2 and hashes[0] != hashes[1]:
            changes.append(text)
    return [*differences("", started, job), *changes]
