"""A job of embedding, and how one process computes parts of it."""

import hashlib
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from dmlkit import __version__
from dmlkit.datasets.files.dataset import Dataset
from dmlkit.distributed.launch import Ranks
from dmlkit.embedding.in_memory import UNSOUND, Embeddings, Known, fused
from dmlkit.embedding.local_features import batch_features
from dmlkit.embedding.manifest import SplitRecord
from dmlkit.embedding.parts import Part, PartFolder
from dmlkit.embedding.progress_bar import Advance
from dmlkit.embedding.trained import TrainedModel, describe
from dmlkit.errors import UserError
from dmlkit.loading.batches import make_loader
from dmlkit.loading.inputs import Draw, Inputs, inputs_of
from dmlkit.manifolds.numerics.check_points import check_points
from dmlkit.recipe.plugin import plugins_of
from dmlkit.run_folder.threshold import Threshold

Compute = Callable[[list[int], Advance], None]
"""Compute parts, given by their numbers, and report how many more images are done."""


@dataclass(frozen=True)
class EmbedJob:
    """Images to embed, and the output.

    Args:
        dataset: the images.
        source: name of the images, for the manifest.
        output: folder that all processes can reach, without embeddings yet.
        skip_bad_images: leave out images that cannot be read, instead of stopping.
        threshold: threshold of the model, for the manifest; the parts do not depend on it.
        split: what embeddings that are kept in a run depend on besides the model; for the manifest too.
        run: run of the model, for the manifest.
        known: points that need not be computed.
        stamps: size and modification time of the file of each image that is kept in a run; None for other samples.
    """

    dataset: Dataset
    source: str
    output: Path
    skip_bad_images: bool
    threshold: Threshold | None = None
    split: SplitRecord | None = None
    run: Path | None = None
    known: Known | None = None
    stamps: Sequence[tuple[int, int] | None] = ()
    again: ClassVar[str] = "rerun the same command"
    way_on: ClassVar[str] = (
        "repair or remove it, or skip such images with --skip-bad-images, and rerun the same command to resume"
    )

    def inputs(self, trained: TrainedModel) -> Inputs:
        """Return the samples as a model takes them."""
        return inputs_of(self.dataset, trained.recipe.transform, training=False, draft=trained.is_draft)

    @property
    def parts(self) -> PartFolder:
        """Folder of the parts."""
        return PartFolder(self.output, len(self.dataset))

    def describe(self, trained: TrainedModel) -> dict[str, Any]:
        """Return what the parts depend on, as plain data."""
        digest = hashlib.sha256()
        for index in range(len(self.dataset)):
            digest.update(self.dataset.key(index).encode() + b"\0")
        images = {"count": len(self.dataset), "hash": digest.hexdigest(), "images_per_part": self.parts.part_images}
        model = describe(trained).plain()
        plugins = [record.model_dump() for record in plugins_of(trained.recipe)]
        theirs: dict[str, Any] = {"plugins": plugins} if plugins else {}
        theirs |= {"local": trained.local.model_dump(mode="json")} if trained.local else {}
        return {"dmlkit": __version__, **model, "source": self.source, "list": images, **theirs}


class PartEmbedder:
    """Computation of parts with one model in one process; images of the next part are read during the current one.

    Args:
        job: images to embed, and the output.
        trained: the model.
        fabric: device of the model.
        workers: number of processes that read images; see `dmlkit.loading.batches.make_loader`.
    """

    def __init__(self, job: EmbedJob, trained: TrainedModel, fabric: Ranks, *, workers: int | None) -> None:
        self.parts, self.paths = job.parts, job.dataset.paths
        self.skip_bad_images, self.way_on = job.skip_bad_images, job.way_on
        self.trained, self.device, self.dataset = trained, fabric.device, job.dataset
        self.kept: list[Tensor] = []  # local features of the batches of a part
        self.known = job.known or Known(torch.empty(0, dtype=torch.int64), torch.empty(0, trained.manifold.point_dim))
        self.batches = PartBatches(self.parts, {*self.known.rows.tolist()})
        self.loaders: list[tuple[TrainedModel, Any]] = []
        for model in trained.members or (trained,):
            loader: Any = ()
            if len(self.known.rows) < len(job.dataset):
                model.model.check_takes(job.dataset)
                inputs = job.inputs(model)
                loader = make_loader(inputs, self.batches, workers=workers, pin_memory=self.device.type == "cuda")
            self.loaders.append((model, loader))

    def __call__(self, numbers: list[int], advance: Advance) -> None:
        """See `Compute`."""
        self.batches.numbers = numbers
        batches = [(model, iter(loader)) for model, loader in self.loaders]
        local = self.trained.local
        with batch_features(local, self.trained, self.dataset) if local else nullcontext() as features:
            for number in numbers:
                known, count = self.known.within(self.parts.images(number)), len(self.batches.of(number))
                if len(known.rows):
                    advance(len(known.rows))
                self.kept = [torch.empty(0, *local.shape, dtype=torch.float16)] if local else []
                found = [self._part(model, islice(given, count), advance, features) for model, given in batches]
                part = found[0] if len(found) == 1 else fused(self.trained, found)
                rows, points = known.joined(part.indices, part.points)
                kept = torch.cat(self.kept) if local else None
                self.parts.write(number, Part(points, rows, part.faults, self.trained.place, kept))

    @torch.inference_mode()
    def _part(
        self,
        trained: TrainedModel,
        batches: Iterator[Any],
        advance: Advance,
        features: Callable[[Tensor], Tensor] | None,
    ) -> Embeddings:
        """Embed the images of a part that are not known with one model, and keep their local features."""
        points = [torch.empty(0, trained.manifold.point_dim)]
        labels = [torch.empty(0, dtype=torch.int64)]
        indices = [torch.empty(0, dtype=torch.int64)]
        faults: list[str] = []
        for batch in batches:
            if batch.faults and not self.skip_bad_images:
                raise UserError(f"{batch.faults[0]}; {self.way_on}")
            faults += batch.faults
            if len(batch.labels):
                points.append(trained.model(batch.inputs.to(self.device)).float().cpu())
                labels.append(batch.labels)
                indices.append(batch.indices)
                names = [str(self.paths[index]) for index in batch.indices.tolist()]
                check_points(trained.manifold, points[-1], names.__getitem__, UNSOUND)
                if features is not None:
                    self.kept.append(features(batch.indices))
            if trained is self.loaders[0][0]:
                advance(len(batch.labels) + len(batch.faults))
        return Embeddings(torch.cat(points), torch.cat(labels), torch.cat(indices), faults)


class PartBatches:
    """Batches of some parts, one after another; set ``numbers`` before each pass.

    Args:
        parts: folder that defines the parts.
        known: images whose points are known.
    """

    def __init__(self, parts: PartFolder, known: Container[int]) -> None:
        self.parts, self.known = parts, known
        self.numbers: list[int] = []

    def of(self, number: int) -> list[list[Draw]]:
        """Return the batches of a part."""
        return self.parts.batches(number, self.known)

    def __iter__(self) -> Iterator[list[Draw]]:
        for number in self.numbers:
            yield from self.of(number)
