"""``threshold.json``: the similarity from which on two images are considered the same class."""

from pathlib import Path
from typing import ClassVar

from pydantic import BaseModel, FiniteFloat, NonNegativeInt

from dmlkit.files.document import Document
from dmlkit.metrics.reliability import Reliability, Share
from dmlkit.run_folder.folder import CheckpointName, RunFolder


class PairRates(BaseModel, frozen=True, extra="forbid"):
    """Error rates of a threshold over all pairs of images of some classes."""

    classes: NonNegativeInt
    images: NonNegativeInt
    same: NonNegativeInt
    """Number of pairs of the same class."""
    different: NonNegativeInt
    """Number of pairs of different classes."""
    far: Share
    """False accept rate: the share of pairs of different classes that reach the threshold."""
    frr: Share
    """False reject rate: the share of pairs of the same class that do not reach the threshold."""


class PairProbability(BaseModel, frozen=True, extra="forbid"):
    """Probability 1 / (1 + exp(-z)) that two images are of the same class, with z = slope * similarity + offset.

    It holds if every second pair is of the same class. If a share p of the pairs is, add log(p / (1 - p)) to z.
    """

    slope: FiniteFloat
    offset: FiniteFloat
    reliability: Reliability | None
    """Reliability on validation classes that did not fit the probability; null for fewer than 5 classes."""


class Threshold(Document, frozen=True):
    """Threshold that ``dmlkit calibrate`` chose for a run's model."""

    kind: ClassVar[str] = "calibrated threshold"

    weights: str
    """Fingerprint of the model that the threshold belongs to."""
    checkpoint: CheckpointName
    """Checkpoint with these weights."""
    similarity: str
    """Name of the similarity in whose unit the threshold is."""
    threshold: FiniteFloat
    """Two images are considered the same class if their similarity is at least this."""
    far: Share
    """Requested false accept rate."""
    far_interval: tuple[Share, Share] | None
    """95 % interval of the false accept rate on as many other classes, by bootstrap over classes; null if there are
    too few classes for an interval."""
    validation: PairRates
    """Rates on the validation classes, on which the threshold was chosen."""
    test: PairRates | None
    """Rates on test classes, which are not used for the choice; null if there are none."""
    probability: PairProbability
    """Probability that two images are of the same class, fitted to validation pairs."""
    where: str | None = None
    """Conditions on the rows of the run's table, of which alone it was chosen, see `Where`; null for all."""


def threshold_of(run: RunFolder, weights: str) -> Threshold | None:
    """Return the threshold of a run for weights; None if there is none, or if it is for other weights."""
    if not run.threshold_path.exists():
        return None
    threshold = Threshold.read(run.threshold_path)
    return threshold if threshold.weights == weights else None


def threshold_value(run: Path | None, weights: str, otherwise: float | None = None) -> float | None:
    """Return the similarity that a run is calibrated to for weights, or another one if it is not."""
    calibrated = None if run is None else threshold_of(RunFolder(run), weights)
    return otherwise if calibrated is None else calibrated.threshold
