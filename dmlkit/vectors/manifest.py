"""Metadata stored with embeddings: model, preprocessing, geometry, index."""

import hashlib
import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, FiniteFloat, NonNegativeInt, PositiveInt

from dmlkit.component import one_of
from dmlkit.errors import UserError
from dmlkit.files.document import Document, differences
from dmlkit.manifolds.base import Manifold, ManifoldConfig
from dmlkit.run_folder.folder import CheckpointName
from dmlkit.run_folder.threshold import Threshold
from dmlkit.transforms.base import Channels, PositiveChannels

LEAST_COSINE = 0.9999
NEAREST = 10
"""The agreement within which embeddings of two computations may be compared: cosine and nearest images."""


class SearchIndex(BaseModel, frozen=True, extra="forbid", strict=True):
    """Search for neighbors by inner products alone."""

    order: str = "the largest inner products of the vectors of a query and of the gallery are the most similar"
    """Order of the results."""
    form: Literal["as_is", "unit", "unit_space", "euclidean_lift", "poincare_lift", "lorentz_lift", "own"]
    """Conversion of an embedding to the vector of a query or of the gallery, see `dmlkit.vectors.index_vectors`;
    ``own`` is that of a plug-in's manifold, which computes it."""
    curvature: FiniteFloat | None = None
    """Curvature K, for the two hyperbolic lifts."""


class ModelSource(BaseModel, frozen=True, extra="forbid", strict=True):
    """Model that made the embeddings."""

    fingerprint: str
    """Hash of all weights; models with equal fingerprints give equal embeddings."""
    checkpoint: CheckpointName
    """Name of the checkpoint."""
    epoch: NonNegativeInt
    """Number of finished epochs."""
    backbone: dict[str, Any]
    """Name and options of the backbone, as in the recipe."""


class Preprocessing(BaseModel, frozen=True, extra="allow", strict=True):
    """Conversion of an image to the pixels that the model takes: the recipe's transform, with the keys of its kind."""

    input: str = "RGB pixels 0..255, upright"
    """Images before the conversion."""
    name: str
    """Name of the transform."""
    size: PositiveInt
    """Side of the square that the model sees, in pixels."""
    mean: Channels
    """Mean of each channel, in the order of ``channels``, of pixels in 0..``pixel_max``."""
    std: PositiveChannels
    """Standard deviation of each channel, in the same order and scale."""
    channels: Literal["rgb", "bgr"]
    """Order in which the backbone takes the color channels."""
    pixel_max: Literal[1, 255]
    """Value of white before ``mean`` and ``std`` are applied."""


class VectorInput(BaseModel, frozen=True, extra="forbid", strict=True):
    """Input of a model that takes vectors, or another kind of samples, unchanged."""

    input: str = "vectors, as they are"
    """Kind of input."""
    num_features: PositiveInt | None
    """Number of coordinates of a vector; null for another kind of samples."""


class Fusion(BaseModel, frozen=True, extra="forbid", strict=True):
    """Second model of a fusion, whose similarity is (1 - share) * first + share * second."""

    run: str
    """Run of the second model, at the time of creation; ``local`` for matches of patches by the first model."""
    checkpoint: CheckpointName
    """Its checkpoint."""
    fingerprint: str
    """Hash of its weights."""
    share: Annotated[FiniteFloat, Field(ge=0, le=1)]
    """Weight of its similarity."""
    weights: Literal["mean", "logistic"]
    """How the weight was found: ``mean`` of the logits that are calibrated for each similarity alone, or ``logistic``
    regression on both. The one with the higher map@r of validation classes that did not fit it was taken."""
    alone: FiniteFloat | None
    """map@r of the first model on the validation classes; null for fewer than 3 with two images."""
    together: FiniteFloat | None
    """map@r of the fusion on validation classes that did not fit the weight."""


class LocalFusion(Fusion, frozen=True, extra="forbid", strict=True):
    """Weight of matches of local features, which a gallery keeps for each image; see `dmlkit.identify.search`."""

    mean: tuple[FiniteFloat, ...]
    """Mean of the patches of validation images, which is subtracted from all patches."""
    shape: tuple[PositiveInt, PositiveInt]
    """Features of an image, and numbers of each."""

    @property
    def weight(self) -> Fusion:
        """The weight alone."""
        return Fusion(**{name: getattr(self, name) for name in Fusion.model_fields})


class Computation(BaseModel, frozen=True, extra="forbid", strict=True):
    """What computed embeddings instead of torch in float32, and how far both agree on training images of the run."""

    engine: Literal["torch", "onnxruntime"]
    """Program that computed the network."""
    precision: Literal["fp32", "bf16", "fp16", "int8"]
    """Precision; all but ``fp32`` are mixed: the points are computed in float32 from features in a lower precision.
    ``fp16`` and ``int8`` are those of an exported model."""
    images: PositiveInt
    """Number of training images on which both were compared, at most 64."""
    cosine: FiniteFloat
    """Smallest cosine of the two embeddings of an image."""
    same_nearest: NonNegativeInt
    """Number of these images whose 10 nearest others are the same."""

    @property
    def agrees(self) -> bool:
        """Whether the embeddings may be compared with those of torch in float32."""
        return self.cosine >= LEAST_COSINE and self.same_nearest == self.images

    @property
    def option(self) -> str:
        """The end of the option ``--device`` that chooses it."""
        options = {"bf16": "+bf16", "fp32": "" if self.engine == "torch" else f"+{self.engine}"}
        return options.get(self.precision, f"+{self.engine}")

    def __str__(self) -> str:
        same = f"the same {NEAREST} nearest for {self.same_nearest} of {self.images} training images"
        return f"least cosine to torch {self.cosine:.6f}, {same}"


class Description(Document, frozen=True, strict=True):
    """Description of a model for users of its embeddings: geometry, fingerprint and preprocessing."""

    kind: ClassVar[str] = "description of a model"
    renewal: ClassVar[str] = ""
    """End of the advice for embeddings of another model, where all embeddings can be made again."""

    dim: PositiveInt
    """Number of coordinates of an embedding."""
    features: PositiveInt
    """Dimensions of the manifold; one less than ``dim`` on the hyperboloid."""
    dtype: Literal["float32"] = "float32"
    """Type of a coordinate."""
    manifold: Annotated[ManifoldConfig, one_of]
    """Manifold of the embeddings, with the options that training has learned."""
    similarity: str
    """Name of the similarity of two embeddings."""
    index: SearchIndex = Field(default_factory=lambda fields: index_of(fields["manifold"].build(fields["features"])))
    """Search for the most similar embeddings, for programs without dmlkit."""
    model: ModelSource
    """Source of the embeddings."""
    preprocessing: Preprocessing | VectorInput
    """Preprocessing of an image, or the vectors that the model takes."""
    fusion: Fusion | None = None
    """Second model, if the embeddings are those of two models one after the other; the fields above are of the first
    one, but for the geometry and the fingerprint."""
    computation: Computation | None = None
    """What computed the embeddings; null for torch in float32. If it does not agree with torch, the fingerprint is not
    that of the weights alone, because such embeddings are those of another model."""
    aligned_to: str | None = None
    """Fingerprint of the older model with whose embeddings these may be compared, because ``dmlkit align`` mapped the
    model into its space, or the regularizer ``compatible`` trained it there; null for a space of its own."""

    def build_manifold(self) -> Manifold:
        """Return the manifold of the embeddings."""
        return self.manifold.build(self.features)

    @property
    def space(self) -> str:
        """Fingerprint of the model whose space the embeddings are in."""
        return self.aligned_to or self.model.fingerprint


class Checksums(BaseModel, frozen=True, extra="forbid", strict=True):
    """CRC-32 of the files next to a manifest."""

    points: NonNegativeInt
    """Checksum of the numbers in ``embeddings.npy``, without its header."""
    items: NonNegativeInt
    """Checksum of ``items.parquet``."""


class ListingTable(BaseModel, frozen=True, extra="forbid", strict=True):
    """Table that lists the images, by the keys of a recipe's dataset."""

    file: str
    """Its path."""
    root: str | None
    """Folder that its paths are relative to; null for its own folder."""
    columns: dict[str, str]
    """Its columns by dmlkit's names, as far as they were named."""


class StoredModel(Document, frozen=True, strict=True):
    """``model.json`` of a `VectorStore`: what its points depend on besides their images."""

    kind: ClassVar[str] = "description of stored points"

    saved: str
    """Hash of what the checkpoint holds of the model, from which its fingerprint is known without building it; empty
    for a model that is not the whole one of a run."""
    fingerprint: str
    """Hash of all weights."""
    description: dict[str, Any]
    """Geometry, preprocessing, and what computes the points."""
    software: dict[str, str]
    """Versions of the packages that decode and embed images, and hashes of the recipe's plug-ins."""
    device: str
    """Kind of the device, e.g. ``cpu`` or ``cuda+bf16``: results of others differ in the last bits."""

    @property
    def key(self) -> str:
        """Name of the folder of the points."""
        text = json.dumps(self.plain() | {"saved": ""}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


class Manifest(Description, frozen=True, strict=True):
    """``manifest.json`` of a folder of embeddings."""

    kind: ClassVar[str] = "manifest of embeddings"

    source: str
    """Source of the images: the absolute path of a folder or file, or ``dataset:split``."""
    count: NonNegativeInt
    """Number of embeddings."""
    skipped: tuple[str, ...]
    """One message per image that could not be read and was left out."""
    threshold: Threshold | None = None
    """Similarity from which two images count as the same class, if ``dmlkit calibrate`` was run before."""
    run: str | None = None
    """Run whose model made the embeddings; null where its path is not UTF-8."""
    checksums: Checksums | None = None
    """Checksums of the files next to it; null in a manifest of other files."""
    table: ListingTable | None = None
    """Table that lists the images, whose other columns ``dmlkit eval --by`` reads; null if there is none."""
    limits: tuple[str, ...] = ()
    """What limits the searches among these images in an evaluation of the run: ``query``, ``gallery`` and ``group``."""


def index_of(manifold: Manifold) -> SearchIndex:
    """Return the search index for points of a manifold."""
    return SearchIndex(**manifold.index_form())


def check_same_description(theirs: Description, whose: str, ours: Description, where: str) -> None:
    """Raise a `UserError` unless embeddings are of one model, or of one mapped into the space of the other.

    ``whose`` names what is compared in the error, and ``where`` what is there.
    """
    advice = f"embed with the model of {where}, or map the newer model with dmlkit align{ours.renewal}"
    is_aligned = theirs.space == ours.space and theirs.model.fingerprint != ours.model.fingerprint
    if (theirs.dim, theirs.features) != (ours.dim, ours.features):
        raise UserError(f"{whose}: embeddings with {theirs.dim} dimensions, but {where} has {ours.dim}; {advice}")
    for name, one, other in (
        ("manifold", theirs.manifold, ours.manifold),
        ("preprocessing", theirs.preprocessing, ours.preprocessing),
    ):
        changes = list(differences(name, other.model_dump(mode="json"), one.model_dump(mode="json")))
        if changes and not (is_aligned and name == "preprocessing"):
            raise UserError(f"{whose}: embeddings of another model ({'; '.join(changes)}); {advice}")
    if is_aligned or theirs.model.fingerprint == ours.model.fingerprint:
        return
    if theirs.computation != ours.computation:
        computations = (theirs.computation, ours.computation)
        ways = [f"{way.engine} in {way.precision}" if way else "torch in fp32" for way in computations]
        change = f"add {ours.computation.option} to --device" if ours.computation else "use --device without a runtime"
        raise UserError(
            f"{whose}: embeddings by {ways[0]}, but those of {where} are by {ways[1]}, and the two do not agree; "
            f"{change}"
        )
    raise UserError(
        f"{whose}: embeddings of another model (fingerprint {theirs.model.fingerprint[:12]}, "
        f"{where} has {ours.model.fingerprint[:12]}); {advice}"
    )
