"""Recipes by name, in a folder where nothing is."""

from collections.abc import Callable
from pathlib import Path

import pytest

from dmlkit.errors import UserError
from dmlkit.recipe.file import dump_recipe, read_recipe
from dmlkit.recipe.shipped import copy_recipe, find_recipe, names_of_recipes
from tests.conftest import ROOT, Result


@pytest.fixture(autouse=True)
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_name_is_the_recipe_and_a_file_of_that_name_comes_first(empty: Path):
    named = read_recipe(Path("glyphs/triplet"))
    assert named == read_recipe(ROOT / "recipes" / "glyphs" / "triplet.yaml")
    (empty / "glyphs").mkdir()
    (empty / "glyphs" / "triplet").write_text("dataset: {name: glyphs}\nloss: {name: margin}\n")
    assert read_recipe(Path("glyphs/triplet")).loss.name == "margin"


@pytest.mark.parametrize("name", names_of_recipes())
def test_a_copy_says_the_same(name: str, empty: Path):
    written = copy_recipe(name, empty / "mine.yaml")
    assert written[-1] == empty / "mine.yaml" and {path.parent for path in written} == {empty}
    assert dump_recipe(read_recipe(empty / "mine.yaml")) == dump_recipe(read_recipe(Path(name)))


def test_copy_writes_where_it_is_told_and_replaces_nothing(empty: Path, dmlkit: Callable[..., Result]):
    first = dmlkit("copy", "mpa/sop")
    assert first.out == "written: mpa_base.yaml\nwritten: sop.yaml\n"
    assert dmlkit("copy", "mpa/cub200", "birds.yaml").code == 0  # extends the same file
    (empty / "mpa_base.yaml").write_text("changed")
    refused = dmlkit("copy", "mpa/sop", "other.yaml")
    assert refused.code == 2 and not (empty / "other.yaml").exists()
    assert refused.err == "error: copy: mpa_base.yaml already exists; use another FILE: dmlkit copy mpa/sop FILE\n"


@pytest.mark.parametrize("name", ["glyphs/tripet", "recipes/glyphs/triplet.yaml", "recipes/glyphs/triplet"])
def test_what_is_nearly_a_name_is_told(name: str):
    with pytest.raises(UserError, match="did you mean glyphs/triplet, which comes with dmlkit"):
        find_recipe(Path(name))


@pytest.mark.parametrize("name", ["photos.yaml", "study/mpa", "grouplet/_base", "../glyphs/triplet"])
def test_what_is_no_name_is_told(name: str):
    with pytest.raises(UserError, match="no such file; expected a recipe"):
        find_recipe(Path(name))


def test_an_unknown_name_is_not_copied(dmlkit: Callable[..., Result]):
    told = dmlkit("copy", "glyphs/tripet")
    assert told.code == 2
    assert told.err == "error: copy: dmlkit has no recipe 'glyphs/tripet'; did you mean 'glyphs/triplet'?\n"


def test_the_list_shows_names_to_type(dmlkit: Callable[..., Result]):
    shown = dmlkit("list", "recipes").out
    assert "glyphs/proxy_anchor" in shown and "dmlkit copy NAME FILE" in shown
