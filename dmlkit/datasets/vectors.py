"""Vectors: embeddings of any model, of anything, with labels."""

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from dmlkit.component import Requirement
from dmlkit.datasets.base import DatasetConfig
from dmlkit.datasets.files.listing import Listing
from dmlkit.datasets.files.vector_file import VectorFile
from dmlkit.datasets.files.vector_rows import list_vectors
from dmlkit.errors import UserError


class VectorsConfig(DatasetConfig, frozen=True):
    """Embeddings of any model, of anything, to train a head over; with ``backbone: {name: identity}``.

    Without splits the first half of the sorted labels trains, the rest tests. Of a Parquet file or a folder of
    embeddings the columns ``query``, ``gallery`` and ``super_class`` count as in a table of images, and ``path`` names
    what a vector is of.
    """

    sample: ClassVar = "vector"

    name: Literal["vectors"] = "vectors"
    embeddings: str = Field(min_length=1)
    """An .npy file (N, D), a .parquet file with lists of D numbers in the column ``embedding``, or a folder that
    ``dmlkit embed`` wrote."""
    labels: str = Field(default="label", min_length=1)
    """An .npy file of N integers or texts, or a column beside the vectors."""
    splits: str | None = Field(default=None, min_length=1)
    """Likewise of ``train``, ``validation`` or ``test``; null takes the column ``split`` where there is one."""

    def listing(self) -> Listing:
        try:
            vectors = VectorFile(Path(self.embeddings))
        except UserError as error:
            raise UserError(f"dataset.embeddings: {error}") from error
        return list_vectors(vectors, self.labels, self.splits)

    def requirements(self) -> list[Requirement]:
        return [
            Requirement("dataset.cache", (None,), "a cache holds decoded images"),
            Requirement("dataset.on_bad_image", ("error",), "it has no images"),
            Requirement("training.augment_on", ("loader",), "vectors are not augmented"),
        ]
