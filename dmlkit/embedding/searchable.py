"""What can be searched: points on a disk with what is known of their images."""

from pathlib import Path
from typing import NamedTuple, Protocol

from lightning_fabric import Fabric
from torch import Tensor

from dmlkit.embedding.manifest import Description, describe
from dmlkit.embedding.search import StoredPoints
from dmlkit.embedding.trained import TrainedModel, load_model
from dmlkit.errors import UserError
from dmlkit.files.document import differences
from dmlkit.manifolds.base import Manifold
from dmlkit.run_folder.folder import RunFolder


class GalleryItem(NamedTuple):
    """What is known of one image of a gallery."""

    id: int | str
    label: str | None
    path: str
    thumbnail: bytes | None = None  # a JPEG


class Searchable(StoredPoints, Protocol):
    """Where to search: a folder of embeddings, or a gallery."""

    @property
    def manifest(self) -> Description:
        """Of the model that embedded it."""
        ...

    @property
    def path(self) -> Path:
        """Where it is."""
        ...

    @property
    def run(self) -> Path | None:
        """The run whose model embeds images for it, where that is known."""
        ...

    def manifold(self) -> Manifold:
        """The geometry of the points."""
        ...

    def items_at(self, rows: Tensor) -> list[GalleryItem]:
        """What is known of the images of rows (M,)."""
        ...


def check_same_model(theirs: Description, whose: str, ours: Description, where: str) -> None:
    """Refuse embeddings of another model.

    Args:
        theirs: of what comes.
        whose: names it, for errors.
        ours: of what is there.
        where: names that.

    Raises:
        UserError: width, geometry, weights or preprocessing differ.
    """
    mend = f"embed with the model of {where}"
    if (theirs.dim, theirs.features) != (ours.dim, ours.features):
        raise UserError(f"{whose}: embeddings of {theirs.dim} dimensions, but {where} has {ours.dim}; {mend}")
    for name, one, other in (
        ("manifold", theirs.manifold, ours.manifold),
        ("preprocessing", theirs.preprocessing, ours.preprocessing),
    ):
        changes = list(differences(name, other.model_dump(mode="json"), one.model_dump(mode="json")))
        if changes:
            raise UserError(f"{whose}: embeddings of another model ({'; '.join(changes)}); {mend}")
    if theirs.model.fingerprint != ours.model.fingerprint:
        raise UserError(
            f"{whose}: embeddings of another model (fingerprint {theirs.model.fingerprint[:12]}, "
            f"{where} has {ours.model.fingerprint[:12]}); {mend}"
        )


def load_same_model(searched: Searchable, run: Path | None, fabric: Fabric) -> TrainedModel:
    """The model that made embeddings.

    Args:
        searched: the embeddings.
        run: that the user names; by default the embeddings' own.
        fabric: a device.

    Raises:
        UserError: no run is known, or its model is another.
    """
    run = run or searched.run
    if run is None:
        raise UserError(
            f"{searched.path}: its run is not known, or has moved; name the run that embeds images with --run RUN"
        )
    trained = load_model(RunFolder(run), fabric, searched.manifest.model.checkpoint)
    check_same_model(describe(trained), str(run), searched.manifest, str(searched.path))
    return trained
