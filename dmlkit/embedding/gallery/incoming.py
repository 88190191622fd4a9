"""What comes into a gallery: which images are new to it, and their rows."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile

from lightning_fabric import Fabric

from dmlkit.datasets.files.dataset import BadImageError
from dmlkit.embedding.gallery.images import LabelledImage
from dmlkit.embedding.gallery.manifest import GalleryManifest
from dmlkit.embedding.gallery.rows import EmbeddedRows
from dmlkit.embedding.in_memory import EMBEDDING, Bar
from dmlkit.embedding.trained import TrainedModel
from dmlkit.files.outputs import writing
from dmlkit.loading.faults import refuse_nothing_read


@dataclass
class Incoming:
    """Images for a gallery, and what came of them.

    Args:
        new: images that the gallery lacks, by their ids.
    """

    new: dict[str, LabelledImage] = field(default_factory=dict[str, LabelledImage])
    repeated: list[str] = field(default_factory=list[str])
    """One message for each picture that is there already, or twice among those that come."""
    skipped: list[str] = field(default_factory=list[str])
    """One message for each that could not be read."""
    added: int = 0
    """Rows that were written."""

    @classmethod
    def of(cls, images: list[LabelledImage]) -> "Incoming":
        """Images with their ids by content."""
        found = cls()
        for image in images:
            try:
                id = image.id()  # noqa: A001
            except BadImageError as error:
                found.skipped.append(str(error))
                continue
            if id in found.new:
                first = found.new[id]
                found.repeated.append(
                    f"{image.path}: the same picture as {first.path}{_other_label(image, first.label)}"
                )
            else:
                found.new[id] = image
        return found

    def drop(self, known: Mapping[str, str | None]) -> None:
        """Leave out those whose ids, with their labels, a gallery has."""
        for id, label in known.items():  # noqa: A001
            image = self.new.pop(id, None)
            if image is not None:
                self.repeated.append(f"{image.path}: is in the gallery already{_other_label(image, label)}")

    @contextmanager
    def embedded(
        self,
        manifest: GalleryManifest,
        trained: TrainedModel,
        fabric: Fabric,
        folder: Path,
        bar: Bar,
    ) -> Generator[EmbeddedRows]:
        """The rows of the new images, which lie in a file without a name until the block ends.

        Raises:
            UserError: none of the images could be read, or see `embed_dataset`.
        """
        with writing(folder), TemporaryFile(dir=folder) as file:  # which may be full only when the file is closed
            rows = EmbeddedRows(manifest, file)
            with bar(EMBEDDING, len(self.new)) as advance:
                broken = rows.embed(self.new, trained, fabric, advance)
            self.skipped += broken.values()
            for id in broken:  # noqa: A001
                del self.new[id]
            refuse_nothing_read(len(self.new) + len(self.repeated), self.skipped, "the images")
            yield rows


def _other_label(image: LabelledImage, label: str | None) -> str:
    return "" if image.label == label else f", with the label {label!r}, which it keeps; here it has {image.label!r}"
