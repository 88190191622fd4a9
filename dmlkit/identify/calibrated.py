"""Calibration that a gallery keeps: the probability of a guess, its threshold, and the rates of errors."""

from pathlib import Path
from zlib import crc32

from pydantic import BaseModel, NonNegativeFloat, NonNegativeInt, PositiveInt

from dmlkit.files.where import Where
from dmlkit.gallery.files import IDENTIFICATION, CalibrationSummary
from dmlkit.gallery.folder import GalleryFolder
from dmlkit.identify.answers import Sigmoid
from dmlkit.metrics.reliability import Reliability, Share

SIZES = (1, 2, 4)  # images of the groups for which probabilities are fitted; larger groups use those of the largest


class Rate(BaseModel, frozen=True, extra="forbid"):
    """Rate with its 95 % interval over as many other labels; null for fewer than 5 labels."""

    rate: Share
    interval: tuple[Share, Share] | None
    labels: NonNegativeInt
    images: NonNegativeInt
    """Images, or groups of images."""


class Fit(BaseModel, frozen=True, extra="forbid"):
    """Probability of guesses by one similarity on groups of so many images, its threshold, and its rates."""

    similarity: str
    size: PositiveInt
    """Number of images of a group; 1 for single images."""
    margin_slope: float
    score_slope: float
    offset: float
    """The probability, see `Sigmoid`."""
    threshold: NonNegativeFloat
    """Minimum probability of an answer; lower ones are `UNKNOWN`."""
    fpir: Rate
    """Above the requested one if the images of one label have the highest probabilities."""
    fnir: Rate
    guessed: Share
    """Share of the images of the gallery's labels whose guess is right, also below the threshold (rank 1)."""

    @property
    def sigmoid(self) -> Sigmoid:
        """Probability of a guess."""
        return Sigmoid(self.margin_slope, self.score_slope, self.offset)


def calibration_file(path: Path, where: Where | None) -> Path:
    """Return the file of the calibration of a gallery; images that fulfill conditions have one of their own."""
    if where is None:
        return path / IDENTIFICATION
    name, suffix = IDENTIFICATION.split(".")
    return path / f"{name}-{crc32(where.text.encode()):08x}.{suffix}"


class Identification(CalibrationSummary, frozen=True, extra="forbid"):
    """``identification.json``: the calibration of ``dmlkit identify`` that is kept in a gallery."""

    where: str | None = None
    """Conditions that the images fulfill which were calibrated for, see `Where`; null for all."""
    column: str | None = None
    """Column whose values have calibrations of their own, see `calibrate_by_value`; null for none."""
    gallery_version: NonNegativeInt
    """Version of the gallery that was calibrated."""
    images: NonNegativeInt
    """Its number of images."""
    near: float | None
    """Similarity from which on images of one label are near-duplicates, which are left out together."""
    requested: Share
    """Requested FPIR."""
    fits: tuple[Fit, ...]
    """By similarity and size; first that of single images by the similarity that `identify` uses."""
    reliability: Reliability
    """Reliability of the first one."""
    trained_labels: tuple[str, ...] | None
    """Labels that the model was trained on; null if the run was not there."""
    is_optimistic: bool | None
    """Whether the rates are of labels that the model was trained on, which separate better than others; null if the
    run was not there."""

    @classmethod
    def of(cls, gallery: GalleryFolder) -> "Identification | None":
        """Return the calibration of a gallery; None if it has none, or one of another model."""
        file = calibration_file(gallery.path, gallery.where)
        calibration = cls.read(file) if file.exists() else None
        return calibration if calibration and calibration.gallery_model == gallery.manifest.current else None
