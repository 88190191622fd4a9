"""Manifest of a gallery: the models of its versions, with the classes of their options."""

from pathlib import Path
from typing import ClassVar, Self

from pydantic import Field, FiniteFloat

from dmlkit.files.source import require_gallery
from dmlkit.gallery.files import MANIFEST, ApproximateIndex, RecordedGallery
from dmlkit.vectors.manifest import Description, LocalFusion


class GalleryModel(Description, frozen=True, strict=True):
    """Model that made all embeddings of a version of a gallery, and what holds for its embeddings alone."""

    kind: ClassVar[str] = "model of a gallery"
    renewal: ClassVar[str] = ", or embed all of its images again with dmlkit gallery migrate"

    run: str
    """Run whose model embeds images, at the time of creation or migration."""
    threshold: FiniteFloat | None
    """Similarity below which an image is unknown."""
    threshold_is_own: bool = True
    """Whether the threshold was given for this gallery; otherwise it is that of the run at the time of creation, and a
    newer one of the run replaces it."""
    approximate: ApproximateIndex | None = None
    """Index built by ``dmlkit gallery index``."""
    local: LocalFusion | None = None
    """Local features of all images; null if there are none."""


class GalleryManifest(RecordedGallery, GalleryModel, frozen=True, strict=True):
    """``gallery.json``: the model of the newest version of a gallery, its options and its versions."""

    others: dict[str, GalleryModel] = Field(default_factory=dict[str, GalleryModel])
    """Models of other versions by their names, see ``dmlkit gallery migrate``."""

    def of_model(self, name: str) -> Self:
        """Return the manifest with one of its models described first; an unknown name is a `KeyError`."""
        if name == self.current:
            return self
        current = GalleryModel(**{field: getattr(self, field) for field in GalleryModel.model_fields})
        others = {**self.others, self.current: current}
        return self.model_copy(update={**dict(others.pop(name)), "current": name, "others": others})


def read_gallery_manifest(path: Path) -> GalleryManifest:
    """Return the manifest of a gallery."""
    require_gallery(path)
    return GalleryManifest.read(path / MANIFEST)
