"""The contracts of all component families, as functions for the tests of new components.

``check_loss(MyLoss.Config())`` raises an AssertionError that names what is broken::

    from dmlkit.testing import check_loss
    from my_losses import MyLoss

    def test_my_loss():
        check_loss(MyLoss.Config(scale=8.0))
"""

from dmlkit.testing.data import check_augmentation, check_dataset, check_transform
from dmlkit.testing.losses import check_loss, check_regularizer
from dmlkit.testing.manifolds import check_manifold
from dmlkit.testing.metrics import check_metric
from dmlkit.testing.networks import check_backbone, check_head, check_pooling, check_tuning
from dmlkit.testing.steps import check_miner, check_optimizer, check_sampler, check_schedule
from dmlkit.testing.transport import check_transport

__all__ = [
    "check_augmentation",
    "check_backbone",
    "check_dataset",
    "check_head",
    "check_loss",
    "check_manifold",
    "check_metric",
    "check_miner",
    "check_optimizer",
    "check_pooling",
    "check_regularizer",
    "check_sampler",
    "check_schedule",
    "check_transform",
    "check_transport",
    "check_tuning",
]
