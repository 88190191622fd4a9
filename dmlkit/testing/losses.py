"""The contract of losses."""

from dmlkit.losses.base import LossConfig
from dmlkit.testing.loss_training import TRAINING, other_manifolds_are_refused
from dmlkit.testing.loss_values import VALUES
from dmlkit.testing.promise import all_manifolds, fits, fitting_manifolds, hold, title


def check_loss(config: LossConfig) -> None:
    """Hold a loss to its contract, on every manifold that its requirements allow.

    Values and gradients are finite and pull, also for degenerate batches and extreme options; neither the order of
    the batch nor the numbers of the classes matter; half precision is computed in full; a checkpoint goes on to the
    bit; a step waits for no GPU; bad batches and other manifolds are refused.

    Raises:
        AssertionError: names what is broken.

    Example:
        >>> from dmlkit.losses import ContrastiveConfig
        >>> check_loss(ContrastiveConfig())
    """
    manifolds = fitting_manifolds(config)
    for manifold in manifolds:
        hold(VALUES, f"{config.name} on {title(manifold)}", config, manifold)
    hold(TRAINING, config.name, config, manifolds[0])
    for manifold in all_manifolds():
        if not fits(config, manifold):
            hold([other_manifolds_are_refused], f"{config.name} on {title(manifold)}", config, manifold)
