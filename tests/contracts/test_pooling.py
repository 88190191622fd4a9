"""Every pooling: a vector for each image, with finite gradients."""

import pytest

from dmlkit.pooling import GeM, PoolingConfig
from dmlkit.testing.networks import POOLING
from dmlkit.testing.promise import Promise, hold

CONFIGS = [*(variant() for _, variant in sorted(PoolingConfig.variants.items())), GeM.Config(learn=True)]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("promise", POOLING, ids=lambda promise: promise.__name__)
def test_contract(promise: Promise, config: PoolingConfig):
    hold([promise], config.name, config)
