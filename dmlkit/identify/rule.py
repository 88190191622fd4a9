"""How labeled images decide on the label of others: the options of ``dmlkit identify``, read without torch."""

from dataclasses import dataclass
from typing import Annotated, Literal

from dmlkit.errors import UserError

Rule = Literal["nearest", "vote"]


@dataclass(frozen=True)
class LabelRule:
    """How labeled images decide on the label of another image, or of a group of images.

    Of a tied vote the nearest image decides. The score of a group's label is the mean over its images; its probability
    is fitted to groups of 1, 2 or 4 images of one label.
    """

    method: Annotated[Rule, "METHOD", "Take the label by: nearest (image) or vote (of the -k nearest images)."] = (
        "nearest"
    )
    k: Annotated[int | None, "COUNT", "Number of images that vote (--method vote). Default: 5."] = None
    threshold: Annotated[
        float | None,
        "SIMILARITY",
        "Similarity below which an image is unknown. Default: the one given for the gallery, else the calibrated "
        "probability of the gallery, else the threshold of its run.",
    ] = None
    by: Annotated[
        str | None,
        "folder|COLUMN",
        "Give one answer per group of images, e.g. of a track or burst: folder (the images of one folder), or a column "
        "of the table of images.",
    ] = None

    def check(self) -> None:
        """Raise a `UserError` unless the parts of the rule are in their ranges and apply to each other."""
        from dmlkit.gallery.files import check_threshold

        if self.by is not None and self.method == "vote":
            raise UserError(f"--by {self.by}: applies to --method nearest, got --method vote")
        check_threshold(self.threshold)
        if self.k is not None and self.method != "vote":
            raise UserError(f"-k {self.k}: applies to --method vote, got --method {self.method}; add it, or remove -k")
        if self.k is not None and self.k < 1:
            raise UserError(f"-k {self.k}: expected at least 1 neighbor, with --method vote")


NEAREST_IMAGE = LabelRule()
