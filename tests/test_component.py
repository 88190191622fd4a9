"""The registry: a new member is found without being listed anywhere."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal

import pytest
from pydantic import BaseModel, ValidationError

import dmlkit.losses
from dmlkit.component import ComponentConfig, MemberError, one_of
from dmlkit.recipe.schema import FAMILIES
from tests.processes import in_copies

EVERY = {path.stem for path in Path(dmlkit.losses.__path__[0]).glob("*.py")} - {"__init__", "base"}  # files of losses


class ShapeConfig(ComponentConfig, frozen=True): ...


class SquareConfig(ShapeConfig, frozen=True):
    name: Literal["square"] = "square"
    side: float = 1.0


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

    assert House.model_validate_json(text).wall.frames["left"].inner == FrameConfig(inner=LateConfig())


ASKED = {
    "LossConfig.variants['triplet']": {"triplet"},
    "dmlkit.losses.Triplet": {"triplet"},
    "'pair_loss' in LossConfig.variants": EVERY,  # no member: all files are searched
    "LossConfig.variants['matryoshka']": EVERY,  # it has no file of its own
    "len(LossConfig.variants)": EVERY,
}
LOAD = """
from pathlib import Path
from dmlkit.errors import UserError
from dmlkit.recipe.plugin import load_file
try:
    load_file(Path({!r}))
except UserError as error:
    print(error)
"""


def test_members_are_imported_when_they_are_asked_for_and_no_plugin_takes_their_names_before(tmp_path: Path):
    """The two members whose names are taken have a file of their own and one with others."""
    loads: dict[str, str] = {}
    for name in ("triplet", "per_factor"):
        text = f"from dmlkit.losses import Loss\nclass Mine(Loss, name={name!r}):\n    def compute(self, *_): ..."
        (tmp_path / name).mkdir()
        (tmp_path / name / "plugin.py").write_text(text)
        loads[LOAD.format(f"{tmp_path}/{name}/plugin.py")] = f"the name {name!r} is taken by dmlkit"
    first = "import dmlkit.losses; from dmlkit.losses import LossConfig\nbefore = {*sys.modules}"
    asked = (f"{one}; print(*{{*sys.modules}} - before)" for one in ASKED)
    lines = iter(in_copies(first, *asked, *loads))
    for one, imported in ASKED.items():
        new = {name.removeprefix("dmlkit.losses.") for name in next(lines).split() if "dmlkit.losses." in name}
        assert new & EVERY - {"pair_loss"} == imported - {"pair_loss"}, one
    for line, taken in zip(lines, loads.values(), strict=True):
        assert f"plugin.py: cannot load this plug-in: {taken}" in line


def test_a_misspelt_class_gets_a_suggestion():
    with pytest.raises(ImportError, match="ProxyAncor"):
        from dmlkit.losses import ProxyAncor  # noqa: F401
    with pytest.raises(AttributeError, match="did you mean 'ProxyAnchor'"):
        dmlkit.losses.ProxyAncor  # noqa: B018


NEEDED = {"backbones": "create", "datasets": "load", "metrics": "per_query", "schedules": "after_warmup"}
NEEDED |= {"tuning": "trained_modules"}


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"transforms"}))
def test_a_member_without_a_needed_method_is_refused_at_its_definition(family: str):
    root = FAMILIES[family]
    scope = {"__name__": __name__, "Root": root, "Literal": Literal}
    with pytest.raises(MemberError, match=rf"Bare: the class must define {NEEDED.get(family, 'build')}\(\)$"):
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
