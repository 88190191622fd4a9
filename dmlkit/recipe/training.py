"""Key ``training`` of a recipe: duration and settings of training."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field, NonNegativeInt, PositiveFloat, PositiveInt

LoggerName = Literal["tensorboard", "mlflow", "wandb"]


class TrainingConfig(BaseModel, frozen=True, extra="forbid", strict=True):
    """Duration and settings of training."""

    epochs: PositiveInt = 20
    """Number of passes over the training images."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Precision; ``bf16`` and ``fp16`` are mixed: weights and losses stay in float32."""
    accumulate: PositiveInt = 1
    """Number of batches whose mean gradient makes one step of the optimizer; the loss is computed per batch, so pairs
    are always within a batch."""
    clip_grad_norm: PositiveFloat | None = None
    """Maximum norm of the gradient of all weights together; null does not clip."""
    clip_grad_value: PositiveFloat | None = None
    """Maximum absolute value of a gradient's coordinate; null does not clip."""
    validate_every: PositiveInt = 1
    """Number of epochs between two validations; the last epoch is always validated."""
    select_by: str = "map@r"
    """Validation metric that chooses the best checkpoint; larger is better."""
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Decay per step, e.g. 0.999, of an exponential moving average of the weights, which is validated, saved and
    exported; null uses the weights themselves."""
    compile: bool = False
    """Compile the backbone with torch.compile. It does not help on 2 CPU cores: a step of ResNet-18 takes 1.67 s
    instead of 1.58 s."""
    gradient_checkpointing: bool = False
    """Store only the inputs of the backbone's blocks for the backward pass, which recomputes the rest: the same weights
    with less memory and more time."""
    shard_proxies: bool = False
    """Under torchrun, each rank keeps only the proxies of its share of the classes, for very many classes."""
    augment_on: Literal["loader", "device"] = "loader"
    """``device`` lets the GPU resize and mirror random crops, if the loader is the bottleneck. The crops are the same,
    and pixels differ by at most 2 of 255. On a CPU it is always the loader."""
    workers: Annotated[NonNegativeInt, Field(le=256)] | None = None
    """Number of processes that read images, at most 256; null is one per CPU core, at most 8, and 0 for images in
    memory."""
    loggers: tuple[LoggerName, ...] = ()
    """Additional loggers of the run, each an extra of dmlkit; training continues if one fails."""
