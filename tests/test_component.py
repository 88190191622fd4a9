"""The registry: a new member is found without being listed anywhere."""

import subprocess
import sys
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import pytest
from pydantic import BaseModel, ValidationError

import dmlkit.losses
from dmlkit.component import ComponentConfig, MemberError, one_of
from dmlkit.recipe.schema import FAMILIES

EVERY = {path.stem for path in Path(dmlkit.losses.__path__[0]).glob("*.py")} - {"__init__", "base"}  # files of losses


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


@pytest.mark.parametrize("name", ["text: str = 'text'", "name: str = 'text'", "name: Literal['a', 'b'] = 'a'"])
def test_a_member_without_a_literal_name_is_refused(name: str):
    scope = {"__name__": __name__, "ShapeConfig": ShapeConfig, "Literal": Literal}
    with pytest.raises(TypeError, match="TextConfig: the class needs a field such as"):
        exec(f"class TextConfig(ShapeConfig, frozen=True):\n    {name}", scope)
    assert "text" not in ShapeConfig.variants


class PlaceConfig(ComponentConfig, frozen=True): ...


class RoomConfig(PlaceConfig, frozen=True):
    name: Literal["room"] = "room"


class FrameConfig(PlaceConfig, frozen=True):
    name: Literal["frame"] = "frame"
    inner: Annotated[PlaceConfig, one_of] | None = None


class Wall(BaseModel):
    frames: dict[str, FrameConfig]


class House(BaseModel):
    wall: Wall


def test_a_member_that_comes_late_is_in_every_union():
    text = '{"wall": {"frames": {"left": {"name": "frame", "inner": {"name": "frame", "inner": {"name": "late"}}}}}}'
    with pytest.raises(ValidationError, match="should have one of the names frame, room "):
        House.model_validate_json(text)

    class LateConfig(PlaceConfig, frozen=True):
        name: Literal["late"] = "late"

    inner = House.model_validate_json(text).wall.frames["left"].inner
    assert inner == FrameConfig(inner=LateConfig())


@pytest.mark.parametrize(
    ("asked", "imported"),
    [
        ("LossConfig.variants['triplet']", {"triplet"}),
        ("dmlkit.losses.Triplet", {"triplet"}),
        ("'pair_loss' in LossConfig.variants", EVERY),  # no member: all files are searched
        ("LossConfig.variants['matryoshka']", EVERY),  # it has no file of its own
        ("len(LossConfig.variants)", EVERY),
    ],
)
def test_a_member_is_imported_when_it_is_asked_for(asked: str, imported: set[str]):
    code = (
        "import sys, dmlkit.losses; from dmlkit.losses import LossConfig\n"
        f"before = {{*sys.modules}}; {asked}; print(*{{*sys.modules}} - before)"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    new = {name.removeprefix("dmlkit.losses.") for name in output.split() if name.startswith("dmlkit.losses.")}
    assert new & EVERY - {"pair_loss"} == imported - {"pair_loss"}


def test_a_plugin_cannot_take_the_name_of_a_member_that_is_not_imported(tmp_path: Path):
    """The two members have a file of their own and one with others."""
    code = "from pathlib import Path; from dmlkit.recipe.plugin import load_file; load_file(Path('plugin.py'))"
    for name in ("triplet", "per_factor"):
        text = f"from dmlkit.losses import Loss\nclass Mine(Loss, name={name!r}):\n    def compute(self, *_): ..."
        (tmp_path / "plugin.py").write_text(text)
        ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
        assert f"plugin.py: cannot load this plug-in: the name {name!r} is taken by dmlkit" in ended.stderr


def test_members_are_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        SquareConfig().side = 2.0


def test_a_misspelt_class_gets_a_suggestion():
    with pytest.raises(ImportError, match="ProxyAncor"):
        from dmlkit.losses import ProxyAncor  # noqa: F401
    with pytest.raises(AttributeError, match="did you mean 'ProxyAnchor'"):
        dmlkit.losses.ProxyAncor  # noqa: B018


LACKING = {
    "augmentations": "build",
    "backbones": "create",
    "datasets": "load",
    "heads": "build",
    "losses": "build",
    "manifolds": "build",
    "metrics": "per_query",
    "miners": "build",
    "optimizers": "build",
    "pooling": "build",
    "regularizers": "build",
    "samplers": "build",
    "schedules": "after_warmup",
    "transport": "build",
    "tuning": "trained_modules",
}


@pytest.mark.parametrize("family", LACKING)
def test_a_member_without_a_needed_method_is_refused_at_its_definition(family: str):
    root = FAMILIES[family]
    scope = {"__name__": __name__, "Root": root, "Literal": Literal}
    with pytest.raises(MemberError, match=rf"Bare: the class must define {LACKING[family]}\(\)$"):
        exec("class Bare(Root, frozen=True):\n    name: Literal['bare'] = 'bare'", scope)
    assert "bare" not in root.variants


def test_a_metric_of_points_needs_no_ranking():
    scope = {"__name__": __name__, "Root": FAMILIES["metrics"], "Literal": Literal, "ClassVar": ClassVar}
    code = "class Bare(Root, frozen=True):\n    name: Literal['bare'] = 'bare'\n    searches: ClassVar[bool] = False"
    with pytest.raises(MemberError, match=r"Bare: the class must define of_points\(\)$"):
        exec(code, scope)


def test_a_member_may_inherit_what_it_needs():
    class Walking(FAMILIES["schedules"], frozen=True, abstract=True):
        def after_warmup(self, epoch: float, epochs: int) -> float:
            return 1 - epoch / epochs

    class Limping(Walking, frozen=True):
        name: Literal["limping"] = "limping"

    try:
        assert Limping().factor(1, 4) == 0.75
    finally:
        del FAMILIES["schedules"].variants["limping"]
