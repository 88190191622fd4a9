"""Dataset of vectors: embeddings of any model, with labels."""

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from dmlkit.component import Requirement
from dmlkit.datasets.base import DatasetConfig
from dmlkit.datasets.files.listing import Listing
from dmlkit.datasets.files.paths import raise_faults
from dmlkit.datasets.files.vectors import VectorFile, VectorList, list_vectors
from dmlkit.errors import UserError, option_errors


class VectorsConfig(DatasetConfig, frozen=True):
    """Embeddings of any model, of images or other data, to train a head on; needs ``backbone: {name: identity}``.

    Without splits, the first half of the sorted labels is for training, the rest for testing. In a Parquet file or a
    folder of embeddings, the columns ``query``, ``gallery`` and ``super_class`` have the same meaning as in a table of
    images, and ``path`` names the source of a vector.
    """

    sample: ClassVar = "vector"

    name: Literal["vectors"] = "vectors"
    embeddings: str = Field(min_length=1)
    """Path of an .npy file (N, D), a .parquet file with lists of D numbers in the column ``embedding``, or a folder
    that ``dmlkit embed`` wrote."""
    labels: str = Field(default="label", min_length=1)
    """An .npy file of N integers or texts, or the name of a column in the vectors' file."""
    splits: str | None = Field(default=None, min_length=1)
    """An .npy file or a column of ``train``, ``validation`` or ``test``; null uses the column ``split`` if there is
    one."""

    def listing(self) -> Listing:
        with option_errors("dataset.embeddings"):
            vectors = VectorFile(Path(self.embeddings))
        return list_vectors(vectors, self.labels, self.splits)

    def unlabeled(self, path: Path) -> VectorList:
        if path.is_dir() and not (path / "manifest.json").exists():
            raise UserError(
                f"{path}: is a folder, but the model takes vectors; expected an .npy or .parquet file of them, or a "
                "folder that dmlkit embed wrote"
            )
        vectors = VectorFile(path)
        raise_faults(vectors.faults())
        return VectorList(vectors)

    def requirements(self) -> list[Requirement]:
        return [
            Requirement("dataset.cache", (None,), "a cache contains decoded images"),
            Requirement("dataset.on_bad_image", ("error",), "the dataset has no images"),
            Requirement("training.augment_on", ("loader",), "vectors are not augmented"),
        ]
