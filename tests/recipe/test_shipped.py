"""Recipes by name, in a folder where nothing is."""

from pathlib import Path

import pytest

from dmlkit.losses.base import LossConfig
from dmlkit.losses.proxies.proxy_loss import ProxyLoss
from dmlkit.recipe.file import dump_recipe, read_recipe
from dmlkit.recipe.overrides import copy_recipe, find_recipe, names_of_recipes
from tests.conftest import ROOT, Cli, refuses


@pytest.fixture(autouse=True)
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_name_is_the_recipe_and_a_file_of_that_name_comes_first(empty: Path):
    assert read_recipe(Path("glyphs/triplet")) == read_recipe(ROOT / "recipes" / "glyphs" / "triplet.yaml")
    (empty / "glyphs").mkdir()
    (empty / "glyphs" / "triplet").write_text("dataset: {name: glyphs}\nloss: {name: margin}\n")
    assert read_recipe(Path("glyphs/triplet")).loss.name == "margin"


def extended_by(name: str) -> str | None:
    text = (ROOT / "recipes" / f"{name}.yaml").read_text("utf-8")
    return next((line for line in text.splitlines() if line.startswith("extends:")), None)


STRUCTURES = {(name.partition("/")[0], extended_by(name)): name for name in names_of_recipes()}


@pytest.mark.parametrize("name", STRUCTURES.values())
def test_a_copy_says_the_same(name: str, empty: Path):
    written = copy_recipe(name, empty / "mine.yaml")
    assert written[-1] == empty / "mine.yaml" and {path.parent for path in written} == {empty}
    assert dump_recipe(read_recipe(empty / "mine.yaml")) == dump_recipe(read_recipe(Path(name)))


def test_copy_writes_where_it_is_told_and_replaces_nothing(empty: Path, dmlkit: Cli):
    assert dmlkit("copy", "mpa/sop").out == "written: mpa_base.yaml\nwritten: sop.yaml\n"
    assert dmlkit("copy", "mpa/cub200", "birds.yaml").code == 0  # extends the same file
    dmlkit("copy", "mpa/sop", "mpa_base.yaml").refused("the file that mpa/sop extends; use another FILE")
    (empty / "mpa_base.yaml").write_text("changed")
    refused = dmlkit("copy", "mpa/sop", "other.yaml")
    assert refused.code == 2 and not (empty / "other.yaml").exists()
    assert refused.err == "error: copy: mpa_base.yaml already exists; use another FILE: dmlkit copy mpa/sop FILE\n"
    assert dmlkit("copy", "glyphs/triplet", "new/folder/mine.yaml").out == "written: new/folder/mine.yaml\n"
    assert (empty / "new/folder/mine.yaml").read_text() == (ROOT / "recipes/glyphs/triplet.yaml").read_text()
    dmlkit("copy", "glyphs/triplet", "birds.yaml/mine.yaml").refused("birds.yaml is a file; expected a folder")


@pytest.mark.parametrize("name", ["glyphs/tripet", "recipes/glyphs/triplet.yaml"])
def test_what_is_nearly_a_name_is_told(name: str):
    refuses("did you mean glyphs/triplet, which comes with dmlkit", find_recipe, Path(name))


@pytest.mark.parametrize("name", ["photos.yaml", "study/mpa", "grouplet/_base"])
def test_what_is_no_name_is_told(name: str):
    refuses("no such file; expected a recipe", find_recipe, Path(name))


def test_an_unknown_name_is_not_copied(dmlkit: Cli):
    result = dmlkit("copy", "glyphs/tripet").refused()
    assert result.err == "error: copy: dmlkit has no recipe 'glyphs/tripet'; did you mean 'glyphs/triplet'?\n"


def test_the_list_has_a_line_per_recipe_and_opens_with_the_recipes_to_start_with(dmlkit, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = dmlkit("list", "recipes").out.splitlines()
    assert lines[0] == "start" and max(map(len, lines)) <= 80
    assert any("dmlkit copy NAME FILE" in line for line in lines)
    monkeypatch.setenv("COLUMNS", "500")
    cut = [line.removesuffix("...") for line in lines if line.endswith(" ...")]  # between words
    assert cut and not [line for line in cut if line not in dmlkit("list", "recipes").out]
    names = [line.split()[0] for line in lines if line.startswith("  ")]
    assert sorted(names) == sorted(names_of_recipes()) and names[0] == "start/convnext_t"


def test_a_group_is_listed_with_published_results(dmlkit: Cli, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "200")
    shown = dmlkit("list", "recipes", "cgml").out
    assert "R@1 54.8, R@2 66.2, R@4 76.2, R@8 84.5, NMI 61.6, F1 30.7" in shown and "glyphs/" not in shown
    monkeypatch.setenv("COLUMNS", "80")
    lines = dmlkit("list", "recipes", "cgml").out.splitlines()
    whole = [name for name in names_of_recipes() if name.startswith("cgml/") and any(f" {name} " in x for x in lines)]
    assert len(whole) == 12 and max(map(len, lines)) <= 80  # names to copy are not wrapped
    result = dmlkit("list", "recipes", "cgm")
    assert result.code == 2 and result.err.startswith(
        "error: list: there is no group of recipes 'cgm'; expected one of cars, cgml"
    )


def test_losses_are_listed_by_what_they_compare(dmlkit: Cli):
    shown = dmlkit("list", "losses").out
    heads = [shown.index(head) for head in ("OVER PROXIES", "OVER PAIRS", "AROUND OTHER LOSSES")]
    places = {name: [shown.index(f"\n{name}\n") > head for head in heads].count(True) for name in LossConfig.variants}
    proxies = {name for name, loss in LossConfig.variants.items() if issubclass(loss.component, ProxyLoss)}
    assert {name for name, place in places.items() if place == 1} == proxies
    around = {name for name, place in places.items() if place == 3}
    assert around == {"cross_batch_memory", "matryoshka", "per_factor", "sum"}
    assert "OVER" not in dmlkit("list", "losses", "triplet").out


def test_one_component_is_listed_with_its_keys(dmlkit: Cli):
    shown = dmlkit("list", "losses", "proxy_anchor").out
    assert shown.startswith("proxy_anchor\n") and "    margin: 0.1" in shown and "arcface" not in shown
    result = dmlkit("list", "losses", "proxy_ancor")
    assert (result.code, result.err) == (2, "error: list: losses has no 'proxy_ancor'; did you mean 'proxy_anchor'?\n")
