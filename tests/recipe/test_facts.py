"""Facts that classes declare, such as a Riemannian optimizer or a class token; plug-ins declare them as dmlkit does."""

from collections.abc import Callable

import pytest

from dmlkit.errors import UserError
from dmlkit.recipe.file import parse_recipe

RECIPE = "dataset: {name: glyphs}\nloss: {name: proxy_anchor}\n"
OPTIMIZER = '''
from typing import ClassVar, Literal
from dmlkit.optimizers import AdamConfig

class StraightConfig(AdamConfig, frozen=True):
    """Adam."""
    name: Literal["riemannian_by_name"] = "riemannian_by_name"

class CurvedConfig(AdamConfig, frozen=True):
    """Adam on manifolds."""
    is_riemannian: ClassVar[bool] = True
    name: Literal["curved"] = "curved"
'''
BACKBONE = '''
from typing import ClassVar, Literal
from dmlkit.backbones import ResNet18

class TokensConfig(ResNet18.Config, frozen=True):
    """A network with a class token."""
    has_class_token: ClassVar[bool] = True
    name: Literal["tokens"] = "tokens"
'''
METRIC = '''
from typing import ClassVar, Literal
from dmlkit.metrics import MetricConfig, Points

class HalfConfig(MetricConfig, frozen=True):
    """One half."""
    searches: ClassVar[bool] = False
    name: Literal["half"] = "half"
    definition: ClassVar[str] = "half: 1/2"

    def of_points(self, points: Points) -> dict[str, float]:
        return {"half": 0.5}
'''


def test_points_need_an_optimizer_that_says_it_is_riemannian(plugin: Callable[[str], None]):
    plugin(OPTIMIZER)
    text = RECIPE + "manifold: {name: sphere, proxies: points}\n"
    assert parse_recipe(text + "optimizer: {name: curved}\n", "r.yaml").optimizer.is_riemannian
    with pytest.raises(UserError) as error:
        parse_recipe(text + "optimizer: {name: riemannian_by_name}\n", "r.yaml")
    assert str(error.value) == (
        "r.yaml:3: manifold.proxies: points need a Riemannian optimizer to stay on the manifold, "
        "got optimizer riemannian_by_name"
    )


def test_the_pooling_cls_needs_a_backbone_that_says_it_has_a_class_token(plugin: Callable[[str], None]):
    plugin(BACKBONE)

    def text(name: str) -> str:
        return RECIPE + f"backbone: {{name: {name}, pooling: {{name: cls}}}}\n"

    assert parse_recipe(text("tokens"), "r.yaml").backbone.has_class_token
    with pytest.raises(UserError) as error:
        parse_recipe(text("resnet18"), "r.yaml")
    assert str(error.value) == (
        "r.yaml:3: backbone.pooling: cls needs backbone.name timm or tokens or vit, got resnet18, "
        "because only vision transformers have a class token"
    )


def test_a_metric_is_requested_by_its_name_unless_it_says_otherwise(plugin: Callable[[str], None]):
    plugin(METRIC)
    recipe = parse_recipe(RECIPE + "metrics: [map@r, half]\n", "r.yaml")
    assert [name for metric in recipe.metrics for name in metric.names()] == ["map@r", "half"]
