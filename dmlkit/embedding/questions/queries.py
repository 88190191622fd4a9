"""What to search with: an image, a folder of images, or embeddings."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_fabric import Fabric
from torch import Tensor

from dmlkit.datasets.files.dataset import Dataset
from dmlkit.distributed.launch import start_fabric
from dmlkit.embedding.folder import EmbeddingFolder
from dmlkit.embedding.gallery.manifest import holds_gallery
from dmlkit.embedding.images import ImageList, dataset_of
from dmlkit.embedding.in_memory import Embeddings, embed_dataset
from dmlkit.embedding.progress_bar import EMBEDDING, Bar, no_bar
from dmlkit.embedding.searchable import Searchable, check_same_model, load_same_model
from dmlkit.embedding.trained import TrainedModel
from dmlkit.errors import UserError
from dmlkit.loading.faults import refuse_nothing_read

QUERY_ROWS = 4096  # searched at once: their vectors take 16 MB at 512 dimensions
BATCH = 128  # images; for so few the start of loader processes takes longer than the images


@dataclass(frozen=True)
class Queries:
    """Points to search with.

    Args:
        points: (Q, D) float32, or a folder of them, which are checked as they are read.
        paths: Q names.
        skipped: one message per image that could not be read.
    """

    points: Tensor | EmbeddingFolder
    paths: Sequence[str]
    skipped: tuple[str, ...] = ()

    def blocks(self) -> Iterator[Tensor]:
        """The points, a bounded number of rows (n, D) at a time."""
        yield from self.points.split(QUERY_ROWS) if isinstance(self.points, Tensor) else self.points.blocks(QUERY_ROWS)


def queries_of(
    queries: Path,
    searched: Searchable,
    *,
    run: Path | None,
    device: str,
    bar: Bar = no_bar,
) -> Queries:
    """The points of an image, of a folder of images, or of a folder of embeddings.

    Args:
        queries: one of these.
        searched: what they are for.
        run: embeds images; by default that of ``searched``.
        device: where, see `start_fabric`.
        bar: shows each step.

    Raises:
        UserError: there is nothing to read, or it is not of the same model, or no run is named for images.
    """
    if (queries / "manifest.json").exists():
        if run is not None:
            raise UserError(f"--run {run}: {queries} holds embeddings, which need no run; leave it out")
        folder = EmbeddingFolder(queries)
        check_same_model(folder.manifest, str(queries), searched.manifest, str(searched.path))
        return Queries(folder, folder.items["path"].to_pylist(), folder.manifest.skipped)
    if holds_gallery(queries):
        raise UserError(f"{queries}: is a gallery; search with an image, a folder of images, or embeddings")
    if not queries.exists():
        raise UserError(f"{queries}: no such file or folder; expected an image, a folder of images, or embeddings")
    fabric = start_fabric(device)
    trained = load_same_model(searched, run, fabric)
    dataset = ImageList([str(queries)]) if queries.is_file() else dataset_of(queries, "test", trained.recipe)[0]
    found = embed_images(trained, fabric, dataset, str(queries), bar)
    paths = [dataset.paths[int(index)] for index in found.indices]
    return Queries(found.points, paths, tuple(found.faults))


def embed_images(trained: TrainedModel, fabric: Fabric, dataset: Dataset, source: str, bar: Bar = no_bar) -> Embeddings:
    """Embed images; those that cannot be read are told, unless they are all.

    Raises:
        UserError: no image could be read, or see `embed_dataset`.
    """
    workers, transform = 0 if len(dataset) <= BATCH else trained.recipe.training.workers, trained.recipe.transform
    with bar(EMBEDDING, len(dataset)) as advance:
        found = embed_dataset(fabric, trained.model, dataset, transform, workers=workers, advance=advance)
    refuse_nothing_read(len(found.points), found.faults, source)
    return found
