"""The registry: a new member is found without being listed anywhere."""

from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, ValidationError

from dmlkit.component import ComponentConfig, one_of


class ShapeConfig(ComponentConfig, frozen=True): ...


class SquareConfig(ShapeConfig, frozen=True):
    name: Literal["square"] = "square"
    side: float = 1.0


class PairConfig(ShapeConfig, frozen=True):
    name: Literal["pair"] = "pair"
    side: float = 2.0


class Drawing(BaseModel):
    shapes: tuple[Annotated[ShapeConfig, one_of], ...]


def test_the_name_chooses_the_member():
    drawing = Drawing.model_validate_json('{"shapes": [{"name": "pair"}, {"name": "square", "side": 3.0}]}')
    assert drawing.shapes == (PairConfig(), SquareConfig(side=3.0))


def test_options_of_another_member_are_refused():
    with pytest.raises(ValidationError, match="sides"):
        Drawing.model_validate_json('{"shapes": [{"name": "square", "sides": 3}]}')


def test_nothing_is_coerced():
    with pytest.raises(ValidationError, match="side"):
        Drawing.model_validate_json('{"shapes": [{"name": "square", "side": "3"}]}')


def test_a_taken_name_is_refused():
    with pytest.raises(TypeError, match="'square' is taken by"):
        type(
            "OtherConfig",
            (ShapeConfig,),
            {"__module__": "elsewhere", "__annotations__": {"name": Literal["square"]}, "name": "square"},
            frozen=True,
        )


def test_members_are_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        SquareConfig().side = 2.0


def test_a_misspelt_class_gets_a_suggestion():
    with pytest.raises(ImportError, match="ProxyAncor"):
        from dmlkit.losses import ProxyAncor  # noqa: F401
    import dmlkit.losses

    with pytest.raises(AttributeError, match="did you mean 'ProxyAnchor'"):
        dmlkit.losses.ProxyAncor  # noqa: B018
