"""Recipes that extend another: what they resolve to, and everything that is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dmlkit.errors import UserError
from dmlkit.files.yaml_tree import parse_yaml
from dmlkit.recipe.file import parse_recipe, read_recipe
from dmlkit.recipe.overrides import overlay, read_extended, read_tree
from dmlkit.recipe.reference import schema
from tests.conftest import ROOT, Cli, refuses

BASE = """\
dataset: {name: glyphs, classes: 40}
backbone:
  name: small_cnn
  width: 8
loss:
  name: mpa
  proxies_per_class: 3
optimizer: {name: adam, lr: 1e-4, lr_multipliers: {loss: 100}}
metrics: [{name: recall, k: [1, 10]}, {name: map_at_r}]
"""


@pytest.fixture
def recipes(tmp_path: Path) -> Callable[..., Path]:
    """Write files below recipes/, folder and name joined by two underscores, and return the first."""

    def write(**files: str) -> Path:
        paths = [tmp_path / "recipes" / f"{name.replace('__', '/', 1)}.yaml" for name in files]
        for path, text in zip(paths, files.values(), strict=True):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return paths[0]

    return write


@pytest.mark.parametrize(
    ("base", "own", "expected"),
    [
        ("{a: 1, b: {c: 2, d: 3}}", "{b: {d: 4, e: 5}, f: 6}", {"a": 1, "b": {"c": 2, "d": 4, "e": 5}, "f": 6}),
        ("a: {name: x, lr: 1}", "a: {lr: 2}", {"a": {"name": "x", "lr": 2}}),
        ("a: {name: x, lr: 1, eps: 3}", "a: {name: x, lr: 2}", {"a": {"name": "x", "lr": 2, "eps": 3}}),
        ("a: {name: x, lr: 1}", "a: {name: y, eps: 2}", {"a": {"name": "y", "eps": 2}}),
        ("a: {root: data}", "a: {name: x}", {"a": {"root": "data", "name": "x"}}),
        ("a: {b: {name: x, c: 1}, d: 1}", "a: {b: {name: y}}", {"a": {"b": {"name": "y"}, "d": 1}}),
        ("a: [1, 2, 3]", "a: [4]", {"a": [4]}),
        ("a: {b: 1}", "a: null", {"a": None}),
        ("a: 1", "a: {b: 1}", {"a": {"b": 1}}),
        ("a: 1", "{}", {"a": 1}),
    ],
)
def test_mappings_merge_and_all_else_replaces(base: str, own: str, expected: dict[str, object]):
    assert overlay(parse_yaml(base, "base.yaml"), parse_yaml(own, "own.yaml")).data == expected


def test_every_value_keeps_its_place():
    base = parse_yaml("a: {name: x, c: 1}\nb:\n  d: 2\n  e: [1, {f: 1}]\n", "base.yaml")
    tree = overlay(base, parse_yaml("\n\na: {name: y}\nb: {e: [3]}\n", "own.yaml"))
    assert tree.origins == {
        (): "own.yaml:3",
        ("a",): "own.yaml:3",
        ("a", "name"): "own.yaml:3",
        ("b",): "own.yaml:4",
        ("b", "d"): "base.yaml:3",
        ("b", "e"): "own.yaml:4",
        ("b", "e", 0): "own.yaml:4",
    }


def test_a_recipe_resolves_to_what_it_would_be_in_one_file(recipes: Callable[..., Path]):
    own = """\
extends: _base.yaml
dataset: {classes: 60}
loss: {name: proxy_anchor, margin: 0.2}
metrics: [{name: map_at_r}]
"""
    path = recipes(birds__own=own, birds___base=BASE)
    whole = """\
dataset: {name: glyphs, classes: 60}
backbone: {name: small_cnn, width: 8}
loss: {name: proxy_anchor, margin: 0.2}
optimizer: {name: adam, lr: 1e-4, lr_multipliers: {loss: 100}}
metrics: [{name: map_at_r}]
"""
    assert read_recipe(path) == parse_recipe(whole, "whole.yaml")
    overrides = ["loss.margin=0.3", "backbone.width=4"]
    assert read_recipe(path, overrides) == parse_recipe(whole, "whole.yaml", overrides)


@pytest.mark.parametrize(
    ("base", "own", "whole"),
    [  # without a name, a backbone is a small_cnn, and an optimizer is adamw
        ("backbone: {width: 8}", "backbone: {name: resnet18}", "backbone: {name: resnet18}"),
        ("optimizer: {lr: 0.5}", "optimizer: {name: adam}", "optimizer: {name: adam}"),
        ("optimizer: {lr: 0.5}", "optimizer: {name: adamw, eps: 0.1}", "optimizer: {name: adamw, lr: 0.5, eps: 0.1}"),
        ("optimizer: {name: adam, lr: 0.5}", "optimizer: {lr: 0.25}", "optimizer: {name: adam, lr: 0.25}"),
    ],
)
def test_another_name_replaces_a_component_that_is_named_by_default(recipes, base: str, own: str, whole: str):
    rest = "dataset: {name: glyphs}\nloss: {name: triplet}\n"
    path = recipes(birds__own=f"extends: _base.yaml\n{own}\n", birds___base=rest + base)
    assert read_recipe(path) == parse_recipe(rest + whole, "whole.yaml")


def test_another_folder_of_the_collection_is_in_reach_also_from_inside_a_folder(recipes, monkeypatch):
    monkeypatch.chdir(recipes(birds__own="extends: ../shared/base.yaml\n", shared__base=BASE).parent)
    assert read_recipe(Path("own.yaml")) == parse_recipe(BASE, "whole.yaml")


def test_faults_name_the_file_and_line_they_are_in(recipes: Callable[..., Path]):
    base = BASE.replace("width: 8", "widht: 8").replace("lr: 1e-4", "lr: fast")
    path = recipes(birds__own="# own\nextends: _base.yaml\nloss:\n  margn: 0.2\n", birds___base=base)
    folder = path.parent
    with pytest.raises(UserError) as error:
        read_recipe(path)
    assert str(error.value).splitlines() == [
        f"{folder}/_base.yaml:4: backbone.widht: unknown key; did you mean 'width'?",
        f"{folder}/own.yaml:4: loss.margn: unknown key; did you mean 'margin'?",
        f"{folder}/_base.yaml:8: optimizer.lr: got 'fast', expected a valid number",
    ]


def test_rules_across_parts_hold_across_files(recipes: Callable[..., Path]):
    path = recipes(birds__own="extends: _base.yaml\nloss: {name: arcface}\n", birds___base=BASE)
    assert read_recipe(path).loss.name == "arcface"
    path.write_text("extends: _base.yaml\nmanifold: {name: euclidean}\nloss: {name: arcface}\n")
    refuses(r"own.yaml:3: loss: arcface needs manifold.similarity cosine", read_recipe, path)


@pytest.mark.parametrize(
    ("space", "loss"),
    [("lorentz", "{name: multi_similarity}"), ("ball", "{name: cross_batch_memory, loss: {name: multi_similarity}}")],
)
def test_a_curvature_beyond_the_reach_of_unrelated_points_is_refused(recipes, plugin, space, loss):
    plugin("from dmlkit.manifolds import Poincare\n\n\nclass Ball(Poincare, name='ball'):\n    'Derived.'\n")
    text = f"extends: _base.yaml\nloss: {loss}\nmanifold:\n  name: {space}\n  curvature: CURVATURE\n"
    path = recipes(birds__own=text.replace("CURVATURE", "-9.6"), birds___base=BASE)
    read_recipe(path)
    path.write_text(text.replace("CURVATURE", "-12"))
    refuses(r"own.yaml:5: manifold.curvature: got -12, expected -9.6 or weaker", read_recipe, path)
    assert read_recipe(path, is_trained=True).manifold.curvature == -12  # a run of earlier versions stays readable
    path.write_text(text.replace("CURVATURE", "-12") + "  similarity: origin_cosine\n")
    read_recipe(path)
    path.write_text(text.replace("CURVATURE", "-12").replace(loss, "{name: triplet}"))
    read_recipe(path)


@pytest.mark.parametrize(
    ("extends", "message"),
    [
        ("missing.yaml", r"own.yaml:1: extends: .*missing.yaml: no such file"),
        ("/etc/hostname", r"own.yaml:1: extends: /etc/hostname is absolute"),
        ("../../outside.yaml", r"own.yaml:1: extends: ../../outside.yaml is outside .*recipes"),
        ("link.yaml", "is outside"),
        ("loop.yaml", "cannot (follow loop.yaml|read this recipe)"),
        ("3", r"own.yaml:1: extends: got 3, expected the path of a file"),
        ("[_base.yaml]", r"extends: got \['_base.yaml'\]"),
        ("", "extends: got None"),
        ('"a\\0b"', "extends: got 'a"),
        ("chain.yaml", r"chain.yaml:2: extends: .*own.yaml extends this file, which therefore must not extend another"),
        ("list.yaml", r"list.yaml:1: this file has no keys"),
        ("broken.yaml", r"broken.yaml:2: not valid YAML"),
        (".", "cannot read this recipe"),
        ("study.yaml", r"study.yaml: got a study, expected a recipe, because .*own.yaml extends it"),
        ("glyphs/proxy_ancor", r"own.yaml:1: .* did you mean glyphs/proxy_anchor, which comes with dmlkit\?"),
        ("start/full_lite0", r"full_lite0.yaml:3: .*; change a copy: dmlkit copy start/full_lite0 FILE"),
    ],
)
def test_what_may_not_be_extended(recipes: Callable[..., Path], extends: str, message: str):
    path = recipes(birds__own=f"extends: {extends}\n{BASE}", birds___base=BASE, birds__list="- 1\n")
    outside = path.parent.parent.parent / "outside.yaml"
    outside.write_text(BASE)
    (path.parent / "link.yaml").symlink_to(outside)
    (path.parent / "loop.yaml").symlink_to("loop.yaml")
    (path.parent / "chain.yaml").write_text("seed: 1\nextends: own.yaml\n")
    (path.parent / "broken.yaml").write_text("a: 1\nb: [1\n")
    (path.parent / "study.yaml").write_text("claim: a\nvariants: {}\n")
    refuses(message, read_tree, path)


@pytest.mark.parametrize("name", ["glyphs/proxy_anchor", "start/full_lite0"])  # the latter extends another
def test_a_study_extends_no_recipe(recipes: Callable[..., Path], name: str):
    path = recipes(birds__own=f"claim: a\nextends: {name}\n")
    refuses(f"{name}.yaml: got a recipe, expected a study, because .*own.yaml extends it", read_extended, path, "study")


def test_only_a_file_extends(recipes: Callable[..., Path]):
    with pytest.raises(UserError, match=r"^r.yaml:1: extends: only a recipe file can extend another$"):
        parse_recipe("extends: _base.yaml\n" + BASE, "r.yaml")
    path = recipes(birds__own="extends: _base.yaml\n", birds___base=BASE)
    with pytest.raises(UserError, match=r"^--set extends=x.yaml: extends: only a recipe file can extend another$"):
        read_recipe(path, ["extends=x.yaml"])


def test_check_prints_the_resolved_recipe(dmlkit: Cli, recipes: Callable[..., Path]):
    path = recipes(birds__own="extends: _base.yaml\nloss: {gamma: 0.2}\n", birds___base=BASE)
    result = dmlkit("check", path, "--set", "loss.margin=0.3").ok()
    assert "extends" not in result.out
    expected = parse_recipe(BASE, "whole.yaml", ["loss.gamma=0.2", "loss.margin=0.3"])
    assert parse_recipe(result.out, "printed.yaml") == expected


@pytest.fixture(scope="module")
def validator() -> Any:
    return pytest.importorskip("jsonschema").Draft202012Validator(json.loads(json.dumps(schema())))


@pytest.mark.parametrize(
    ("text", "is_valid"),
    [
        (BASE, True),
        ("extends: _base.yaml", True),
        ("{extends: _base.yaml, loss: {gamma: 0.2}}", True),
        ("{extends: _base.yaml, dataset: {name: cars196}}", True),  # the other file has its root
        ("{extends: _base.yaml, loss: {gama: 0.2}}", False),
        ("{extends: _base.yaml, loss: {name: triplet, gamma: 0.2}}", False),
        ("{extends: _base.yaml, loss: {name: triplet, margin: 0}}", True),
        ("{extends: _base.yaml, loss: {name: triplet, margin: -1}}", False),
        ("{extends: 3}", False),
        ("dataset: {name: glyphs}", False),
    ],
)
def test_the_schema_allows_extending(text: str, is_valid: bool, validator: Any):
    assert validator.is_valid(parse_yaml(text, "r.yaml").data) is is_valid


def test_the_schema_finds_no_fault_in_a_recipe_of_the_package(validator: Any):
    paths = [path for path in (ROOT / "recipes").rglob("[!_]*.yaml") if path.parent.name != "study"]
    texts = {path: path.read_text("utf-8") for path in paths}
    assert len(paths) > 80 and any("extends" in text for text in texts.values())
    assert [path for path, text in texts.items() if not validator.is_valid(parse_yaml(text, path.name).data)] == []


@pytest.mark.parametrize(
    ("space", "key"),
    [
        ("{name: poincare, clip_distance: 1}", "clip_distance: got 1, expected at least 2"),
        ("{name: product, factors: [{name: sphere}, {name: lorentz, curvature: -16}]}", "factors.1.curvature: got -16"),
    ],
)
def test_points_that_end_too_near_the_origin_are_refused_where_they_are_set(recipes, space: str, key: str):
    path = recipes(birds__own=f"extends: _base.yaml\nmanifold: {space}\n", birds___base=BASE)
    refuses(rf"own.yaml:2: manifold.{key}", read_recipe, path)
    assert read_recipe(path, is_trained=True).loss.name == "mpa"


def test_a_recipe_that_comes_with_dmlkit_is_extended_by_its_name(recipes: Callable[..., Path]):
    path = recipes(paper__own="extends: glyphs/proxy_anchor\nloss: {scale: 64}\n")
    own, shipped = read_recipe(path), read_recipe(Path("glyphs/proxy_anchor"))
    assert own == read_recipe(Path("glyphs/proxy_anchor"), ["loss.scale=64"]) != shipped
