"""Mutated recipes, overrides and studies: one that is read is read again, any other is refused in few lines."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dmlkit.errors import UserError
from dmlkit.recipe.file import dump_recipe, parse_recipe
from dmlkit.recipe.schema import FAMILIES
from dmlkit.study.definition.file import read_study
from tests.conftest import ROOT
from tests.fuzz.conftest import RECIPE, STUDY, examples

RECIPES = [RECIPE, *(path.read_text() for path in sorted((ROOT / "recipes" / "glyphs").glob("[!_]*.yaml")))]
NAMES = [name for root in FAMILIES.values() for name in root.variants]
STUDIES = [
    STUDY,
    STUDY.replace("seeds:", "tune: {optimizer.lr: [0.01, 0.02]}\nseeds:"),
    STUDY.replace("seeds:", "tune: {loss.scale: [8, 16]}\ntune_seeds: [0, 1, 2]\nextend: 2\nmore_seeds: 8\nseeds:"),
    """\
claim: The best margin lies inside.
recipe: base.yaml
seeds: [0]
metrics: [map@r]
grid: {loss.margin: [0.1, 0.2, 0.3]}
""",
]
LONGEST = 8_000  # characters of a refusal: 20 faults of 400

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, -1, 2**31, 2**63, 2**64, 10**30, -(10**30)]),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(["", " ", "null", "1e999", ".inf", ".nan", "-", "{", "[/x]", "\x1b[31m", "\u202e", "$x^", *NAMES]),
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
)
texts = st.sampled_from(
    ["<<: {seed: 1}", "seed: !!int x", "? [a]\n: 1", "&a [*a]", "!!python/object:os.system x", "\t"]
)


def places(data: Any, key: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The keys of everything below."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [*([key] if key else []), *(place for name, value in items for place in places(value, (*key, name)))]


@st.composite
def mutated(draw: Callable[..., Any], originals: list[str]) -> str:
    """One of some documents with one to three changes of its data, or one of its text."""
    text = draw(st.sampled_from(originals))
    if draw(st.integers(0, 4)) == 0:
        at = draw(st.integers(0, len(text)))
        return text[:at] + draw(texts | st.text(max_size=5)) + text[at + draw(st.integers(0, 3)) :]
    data: Any = yaml.safe_load(text)
    for _ in range(draw(st.integers(1, 3))):
        *path, last = draw(st.sampled_from(places(data))) if places(data) else ["seed"]
        parent: Any = data
        for step in path:
            parent = parent[step]
        change = draw(st.sampled_from(["replace", "delete", "add", "name"])) if data else "replace"
        if change == "delete":
            del parent[last]
        elif change == "replace":
            parent[last] = draw(values)
        elif change == "name" and isinstance(parent, dict):
            parent["name"] = draw(st.sampled_from(NAMES))
        elif isinstance(parent, dict):
            parent[draw(st.text(max_size=8))] = draw(values)
        data = copy.deepcopy(data)
    return yaml.safe_dump(data, allow_unicode=True)


def check(text: str, overrides: list[str]):
    try:
        recipe = parse_recipe(text, "recipe.yaml", overrides)
    except UserError as error:
        assert 0 < len(str(error)) <= LONGEST
        return
    assert parse_recipe(dump_recipe(recipe), "again.yaml") == recipe


@pytest.mark.heavy
@examples(80, 20_000)
@given(mutated(RECIPES))
def test_a_recipe_is_read_and_read_again_or_refused(text: str):
    check(text, [])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the recipe of the studies."""
    place = tmp_path_factory.mktemp("studies")
    (place / "base.yaml").write_text(RECIPE)
    return place


def test_the_studies_are_sound(folder: Path):
    for text in STUDIES:
        (folder / "study.yaml").write_text(text)
        assert read_study(folder / "study.yaml").variants


@pytest.mark.heavy
@examples(80, 20_000)
@given(text=mutated(STUDIES))
def test_a_study_is_read_or_refused(text: str, folder: Path):
    (folder / "study.yaml").write_text(text, encoding="utf-8", errors="surrogatepass")
    try:
        study = read_study(folder / "study.yaml")
    except UserError as error:
        assert 0 < len(str(error)) <= LONGEST
        return
    assert study.variants


KEYS = st.sampled_from(
    ["seed", "loss.margin", "loss", "metrics.0", "metrics.²", "training.epochs", "dataset.name", "a.b.c"]
)


@pytest.mark.heavy
@examples(80, 20_000)
@given(
    KEYS | st.text(max_size=12), st.sampled_from(["=", ".", "", "=="]), scalars.map(str) | texts | st.text(max_size=30)
)
def test_an_override_is_taken_or_refused(key: str, between: str, value: str):
    check(RECIPE, [f"{key}{between}{value}"])


@pytest.mark.parametrize("depth", [100, 900, 100_000])
def test_nested_recipes_are_refused(depth: int, tmp_path: Path):
    for text in ("seed: " + "[" * depth + "]" * depth, "a: {" * depth, "- " * depth):
        with pytest.raises(UserError):
            parse_recipe(text, "deep.yaml")
