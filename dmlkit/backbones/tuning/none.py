"""No tuning: the backbone does not change."""

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, model_validator
from torch import nn

from dmlkit.backbones.tuning.base import Blocks, TuningConfig
from dmlkit.component import Requirement


class NoTuningConfig(TuningConfig, frozen=True):
    """The backbone is frozen, with its batch norms and dropout; head and loss train on its features.

    The features are computed once, before the first step, so that an epoch takes seconds.
    """

    name: Literal["none"] = "none"
    features: Literal["cached", "live"] = "cached"
    """``cached`` computes features once; ``live`` augments the images and computes their features in every step."""
    feature_views: NonNegativeInt = 0
    """Number of augmented views to cache per image; each step uses one of them. 0 caches one view without
    augmentation, as in evaluation."""
    cache: Annotated[str, Field(min_length=1)] | None = None
    """Folder for cached features, which several runs may share; null keeps them in the run folder."""

    @model_validator(mode="after")
    def check_cache(self) -> "NoTuningConfig":
        """Reject keys that live features would ignore."""
        if self.features == "live" and (self.feature_views or self.cache is not None):
            raise ValueError("feature_views and cache need features: cached; remove them, or remove features: live")
        return self

    def trained_modules(self, backbone: nn.Module, blocks: Blocks) -> list[nn.Module]:
        return []

    def requirements(self) -> Iterable[Requirement]:
        frozen = "no weight of the backbone trains"
        yield Requirement("backbone.freeze_epochs", (0,), frozen)
        yield Requirement("training.gradient_checkpointing", (False,), frozen)
        if self.features == "cached":
            yield Requirement("dataset.on_bad_image", ("error",), "features are cached for all images (or use live)")
            yield Requirement(
                "training.augment_on", ("loader",), "cached features are augmented when they are computed"
            )
            yield Requirement("training.compile", (False,), "with cached features the backbone runs only once")
        if self.feature_views:
            yield Requirement("transform.augments", (True,), "without augmentation all views of an image are equal")
        yield Requirement("optimizer.lr_multipliers.backbone", (1.0,), frozen)
