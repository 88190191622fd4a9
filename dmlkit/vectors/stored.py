"""Embeddings of images that a run has: the first command embeds a split, and all others read its points."""

from dataclasses import replace

import numpy as np
import torch

from dmlkit.datasets.base import Split
from dmlkit.datasets.files.dataset import Dataset
from dmlkit.distributed.launch import Ranks
from dmlkit.errors import warn
from dmlkit.files.arrays import Values
from dmlkit.loading.inputs import refuse_nothing_read
from dmlkit.run_folder.folder import RunFolder
from dmlkit.vectors.fill import FillJob, PartEmbedder, UnwritableError, fill
from dmlkit.vectors.in_memory import Embeddings, embed_images, fused
from dmlkit.vectors.progress_bar import Advance, Bar, no_bar
from dmlkit.vectors.store import VectorStore, image_keys, stored_model
from dmlkit.vectors.trained import TrainedModel


def split_embeddings(
    run: RunFolder, trained: TrainedModel, ranks: Ranks, dataset: Dataset, split: Split, *, bar: Bar = no_bar
) -> Embeddings:
    """Return the embeddings of a split of a run; what the run's store lacks is embedded into it.

    The result is equal to the bit to that of `embed_images`. Another process that needs the same points waits for
    them. Where the run cannot be written, a warning says so. Where training has stored the features of frozen
    layers, torch computes only the other layers.
    """
    if trained.fusion is not None:
        runs = [(member.run or run, member) for member in trained.members]
        parts = [split_embeddings(member_run, member, ranks, dataset, split, bar=bar) for member_run, member in runs]
        return fused(trained, parts, range(len(dataset)))
    source = f"the {split} split of {run.path}"

    def compute(job: FillJob, numbers: list[int], advance: Advance) -> None:
        """Compute parts from the images, or from the features of frozen layers that training has stored."""
        model = trained
        if trained.recipe.backbone.tuning.stored() is not None and trained.computation is None:
            from dmlkit.vectors.features import stored_features, trained_part

            features = stored_features(run, trained, dataset, job.keys)
            if features is not None:
                recipe = trained.recipe.model_copy(update={"transform": None})
                part = trained_part(trained.recipe, trained.model).to(trained.device).eval()
                job, model = replace(job, dataset=features), TrainedModel.of(recipe, part)
        PartEmbedder(job, model, ranks)(numbers, advance)

    job = FillJob(dataset, image_keys(dataset, trained.recipe.dataset), run.vectors, stored_model(trained))
    try:
        filled = fill(job, trained, ranks, bar=bar, compute=compute)
    except UnwritableError as error:
        reason = str(error).partition(";")[0]
        warn(f"{reason}; the embeddings are not stored, and the next command embeds the images again")
        return embed_images(trained, ranks, dataset, source, bar)
    refuse_nothing_read(len(dataset) - len(filled.faults), filled.faults, source)
    return _read(filled.store, filled.rows, dataset, filled.faults)


def _read(store: VectorStore, rows: Values, dataset: Dataset, faults: list[str]) -> Embeddings:
    """Return the embeddings of a list of images, given by their rows (N,) in a store; -1 where it has none."""
    indices = torch.from_numpy(np.flatnonzero(rows >= 0))
    return Embeddings(store.points_at(rows[rows >= 0]), dataset.labels[indices], indices, faults)


def embed_files(trained: TrainedModel, ranks: Ranks, dataset: Dataset, source: str, bar: Bar = no_bar) -> Embeddings:
    """Embed images, but read the points of those that the model's run has.

    They are equal to the bit to those computed in the same batches; in others they differ by rounding. Patches of a
    model that computes them are computed with the points, so that no image passes the network twice.
    """
    if trained.fusion is not None:
        parts = [embed_files(member, ranks, dataset, source, bar) for member in trained.members]
        return fused(trained, parts, range(len(dataset)))
    known = known_points(trained, dataset) if ranks.is_global_zero and trained.local is None else None
    return embed_images(trained, ranks, dataset, source, bar, ranks.broadcast(known))


def known_points(trained: TrainedModel, dataset: Dataset) -> Embeddings | None:
    """Return the points of those image files of a list that the model's run has; None if there are none."""
    if trained.run is None or not trained.run.vectors.is_dir():
        return None
    alone = replace(trained, local=None)
    store = VectorStore.at(trained.run.vectors / stored_model(alone).key, alone)
    known = _read(store, store.find(image_keys(dataset)), dataset, [])
    return known if len(known.points) else None
