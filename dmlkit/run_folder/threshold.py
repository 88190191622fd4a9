"""``threshold.json``: from which similarity on two images are taken for the same class."""

from typing import Annotated, ClassVar

from pydantic import BaseModel, Field, FiniteFloat, NonNegativeInt

from dmlkit.files.document import Document
from dmlkit.run_folder.folder import CheckpointName, RunFolder

Share = Annotated[float, Field(ge=0, le=1)]


class PairRates(BaseModel, frozen=True, extra="forbid"):
    """What a threshold does to all pairs of the images of some classes."""

    classes: NonNegativeInt
    images: NonNegativeInt
    same: NonNegativeInt
    """Pairs of one class."""
    different: NonNegativeInt
    """Pairs of two classes."""
    far: Share
    """False accept rate: the share of the pairs of two classes that reach the threshold."""
    frr: Share
    """False reject rate: the share of the pairs of one class that do not."""


class Threshold(Document, frozen=True):
    """What ``dmlkit calibrate`` found for a run's model."""

    kind: ClassVar[str] = "calibrated threshold"

    weights: str
    """Fingerprint of the model that it belongs to."""
    checkpoint: CheckpointName
    """Which of the run's checkpoints that is."""
    similarity: str
    """In whose unit it is."""
    threshold: FiniteFloat
    """Two images are taken for the same class where their similarity is at least this."""
    far: Share
    """The false accept rate that was asked for."""
    far_interval: tuple[Share, Share] | None
    """95 %: the false accept rate to expect on as many other classes, by bootstrap over classes; null where there are
    too few to tell how classes vary."""
    validation: PairRates
    """On the classes that chose it."""
    test: PairRates | None
    """On test classes, which chose nothing; null where there are none."""


def threshold_of(run: RunFolder, weights: str) -> Threshold | None:
    """The threshold of a run that belongs to weights; none where there is none, or one of another checkpoint.

    Raises:
        UserError: ``threshold.json`` is damaged.
    """
    if not run.threshold_path.exists():
        return None
    found = Threshold.read(run.threshold_path)
    return found if found.weights == weights else None
