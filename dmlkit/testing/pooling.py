"""The contract of pooling."""

import torch
from torch import Tensor

from dmlkit.pooling import PoolingConfig
from dmlkit.testing.promise import Promise, a_line_of_help_says_what_it_is, expect, expect_close, hold


def check_pooling(config: PoolingConfig) -> None:
    """Check a pooling against its contract: maps (B, C, H, W) of any size become vectors (B, C), per image.

    Raises:
        AssertionError: the contract is broken; the message says how.

    Example:
        >>> from dmlkit.pooling import GeM
        >>> check_pooling(GeM.Config(learn=True))
    """
    hold(POOLING, config.name, config)


def inputs(height: int = 4, width: int = 5) -> tuple[Tensor, Tensor]:
    """Return maps (2, 3, H, W) and class tokens (2, 3)."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, 3, height, width, generator=generator), torch.randn(2, 3, generator=generator)


def maps_become_vectors(config: PoolingConfig) -> None:
    """Check that a map of any height and width becomes a finite vector of its channels."""
    for height, width in ((1, 1), (4, 5), (7, 7)):
        pooled = config.build()(*inputs(height, width))
        expect(pooled.shape == (2, 3), f"got shape {tuple(pooled.shape)} for maps (2, 3, {height}, {width})")
        expect(pooled.isfinite().all(), f"maps (2, 3, {height}, {width}): nan or inf")


def a_vector_is_of_one_image(config: PoolingConfig) -> None:
    """Check that the vector of an image does not depend on the batch."""
    pooling, (maps, token) = config.build(), inputs()
    alone = torch.cat([pooling(maps[row : row + 1], token[row : row + 1]) for row in range(2)])
    expect_close(pooling(maps, token), alone, "together and alone")


def gradients_are_finite(config: PoolingConfig) -> None:
    """Check that gradients of maps and parameters exist and are finite, also if all features are 0."""
    for scale in (1.0, 0.0):
        pooling = config.build()
        maps, token = (scale * one for one in inputs())
        pooling(maps.requires_grad_(), token.requires_grad_()).sum().backward()
        found = [one.grad for one in (maps, token, *pooling.parameters()) if one.grad is not None]
        expect(bool(found), "nothing has a gradient")
        expect(all(gradient.isfinite().all() for gradient in found), f"features of size {scale}: nan or inf")


def half_precision_does_not_overflow(config: PoolingConfig) -> None:
    """Check that features of 1000 in float16 stay finite under autocast."""
    maps, token = torch.full((1, 1, 2, 2), 1000.0), torch.full((1, 1), 1000.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expect(config.build()(maps.half(), token.half()).isfinite().all(), "nan or inf")


def the_state_dict_is_complete(config: PoolingConfig) -> None:
    """Check that a pooling restored from its state_dict gives identical vectors."""
    pooling, restored = config.build(), config.build()
    for parameter in pooling.parameters():
        parameter.data.add_(0.5)
    restored.load_state_dict(pooling.state_dict())
    expect(torch.equal(restored(*inputs()), pooling(*inputs())), "vectors differ")


POOLING: tuple[Promise, ...] = (
    maps_become_vectors,
    a_vector_is_of_one_image,
    gradients_are_finite,
    half_precision_does_not_overflow,
    the_state_dict_is_complete,
    a_line_of_help_says_what_it_is,
)
