"""No tuning: the backbone stays as it is."""

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, model_validator
from torch import nn

from dmlkit.backbones.tuning.base import Blocks, TuningConfig
from dmlkit.component import Requirement


class NoTuningConfig(TuningConfig, frozen=True):
    """The backbone is frozen for good, its batch norms and dropout too; head and loss train on its features.

    These are computed once, before the first step, so that an epoch takes seconds.
    """

    name: Literal["none"] = "none"
    features: Literal["cached", "live"] = "cached"
    """``live`` computes features anew in every step, of images that are augmented anew."""
    feature_views: NonNegativeInt = 0
    """Augmented views of each image that are kept, of which each step takes one; 0 keeps the image as evaluation shows
    it, without augmentation."""
    cache: Annotated[str, Field(min_length=1)] | None = None
    """A folder for the features, which runs may share; null keeps them in the run."""

    @model_validator(mode="after")
    def check_cache(self) -> "NoTuningConfig":
        """Refuse what live features ignore."""
        if self.features == "live" and (self.feature_views or self.cache is not None):
            raise ValueError("feature_views and cache are of cached features; leave them out, or features: live")
        return self

    def trained_modules(self, backbone: nn.Module, blocks: Blocks) -> list[nn.Module]:
        return []

    def requirements(self) -> Iterable[Requirement]:
        frozen = "nothing of the backbone ever trains"
        yield Requirement("backbone.freeze_epochs", (0,), frozen)
        yield Requirement("training.gradient_checkpointing", (False,), frozen)
        if self.features == "cached":
            yield Requirement("dataset.on_bad_image", ("error",), "its cached features are of all images, or live")
            yield Requirement(
                "training.augment_on", ("loader",), "cached features are augmented when they are computed"
            )
            yield Requirement("training.compile", (False,), "the backbone of cached features runs once")
        if self.feature_views:
            yield Requirement("transform.augments", (True,), "else all views of an image are the same")
        yield Requirement("optimizer.lr_multipliers.backbone", (1.0,), frozen)
