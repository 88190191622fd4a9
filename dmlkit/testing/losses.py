"""The contract of losses."""

from dmlkit.losses.base import LossConfig
from dmlkit.testing.loss_training import TRAINING, other_manifolds_are_refused
from dmlkit.testing.loss_values import VALUES
from dmlkit.testing.promise import all_manifolds, fits, fitting_manifolds, hold, title


def check_loss(config: LossConfig) -> None:
    """Check a loss against its contract, on every manifold that its requirements allow.

    Values and gradients are finite, also for degenerate batches and extreme options; neither the order of the batch nor
    the numbering of the classes matters; half precision is computed in float32; a loss restored from a checkpoint
    continues identically; no step waits for a GPU; invalid batches and other manifolds raise errors.

    Raises:
        AssertionError: the contract is broken; the message says how.

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
