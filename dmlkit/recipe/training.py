"""The key ``training`` of a recipe: how long and how to train, whatever is trained."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field, NonNegativeInt, PositiveFloat, PositiveInt

LoggerName = Literal["tensorboard", "mlflow", "wandb"]


class TrainingConfig(BaseModel, frozen=True, extra="forbid", strict=True):
    """How long and how to train."""

    epochs: PositiveInt = 20
    """Passes over the training images."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """``bf16`` and ``fp16`` are mixed: weights and losses stay in float32."""
    accumulate: PositiveInt = 1
    """Batches whose mean gradient makes a step of the optimizer; each has a loss of its own, so no pair is of two."""
    clip_grad_norm: PositiveFloat | None = None
    """Longest gradient of all weights together; null does not clip."""
    clip_grad_value: PositiveFloat | None = None
    """Largest coordinate of a gradient; null does not clip."""
    validate_every: PositiveInt = 1
    """Epochs between two validations; the last epoch is always validated."""
    select_by: str = "map@r"
    """The validation metric that chooses the best checkpoint; larger is better."""
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Validate, keep and export an exponential moving average of the weights, of which a step leaves e.g. 0.999."""
    compile: bool = False
    """Compile the backbone with torch.compile. No gain on 2 CPU cores: 1.67 s a step of ResNet-18 instead of 1.58 s."""
    gradient_checkpointing: bool = False
    """Keep only the inputs of the backbone's blocks for the backward pass, which computes the rest again: the same
    weights in less memory and more time."""
    shard_proxies: bool = False
    """Under torchrun: each rank keeps the proxies of its share of the classes, for huge numbers of them."""
    augment_on: Literal["loader", "device"] = "loader"
    """``device``: random crops are resized and mirrored by the GPU, for loaders that are slower than it. The same
    crops, and pixels within 2 of 255; on a CPU it is always the loader that does it."""
    workers: Annotated[NonNegativeInt, Field(le=256)] | None = None
    """Processes that read images, at most 256; null takes one a CPU core, at most 8, and none for images in memory."""
    loggers: tuple[LoggerName, ...] = ()
    """Where else the run is shown, each an extra of dmlkit; it loses nothing where one fails."""
