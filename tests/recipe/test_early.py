"""The first check of a recipe gives the errors of the complete check, or none."""

import json
import subprocess
import sys
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from dmlkit.errors import UserError
from dmlkit.recipe.early import NameCheck
from dmlkit.recipe.file import parse_recipe
from dmlkit.recipe.overrides import find_recipes, read_tree, shipped_recipes
from dmlkit.recipe.reference import Reference, describe
from dmlkit.recipe.yaml_tree import parse_yaml

PAPERS = [header.path for headers in find_recipes(shipped_recipes()).values() for header in headers]
BASE = "dataset: {name: glyphs, size: 32}\nloss: {name: triplet}\n"


@cache
def reference() -> Reference:
    """The reference as it is read from the cache."""
    described = describe()
    return described._replace(schema=json.loads(json.dumps(described.schema)))


def early(text: str) -> list[str]:
    return NameCheck(parse_yaml(text, "r.yaml"), reference()).faults()


def complete(text: str) -> list[str]:
    try:
        parse_recipe(text, "r.yaml")
    except UserError as error:
        return str(error).splitlines()
    return []


def mistakes(recipe: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Copies of a recipe, each with a key or a name of a component misspelled, at any depth."""
    for key, value in recipe.items():
        yield {(f"{key}x" if one == key else one): kept for one, kept in recipe.items()}
        if key == "name":
            yield {**recipe, key: f"{value}x"}
        for below in mistakes(value) if isinstance(value, dict) else ():
            yield {**recipe, key: below}
        if isinstance(value, list) and value and isinstance(value[0], dict):
            for below in mistakes(value[0]):
                yield {**recipe, key: [below, *value[1:]]}


@pytest.mark.parametrize("path", PAPERS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_recipe_of_dmlkit_has_no_faults(path: Path):
    assert NameCheck(read_tree(path), reference()).faults() == []
    alone = path.read_text(encoding="utf-8").replace("extends: ", "# ")  # without its base it lacks keys
    assert early(alone) in ([], complete(alone))


RICH = """\
seed: 3
dataset: {name: glyphs, classes: 12, validation_fraction: 0.5}
transform: {name: imagenet, size: 32}
backbone: {name: resnet18, weights: null, pooling: {name: gem, p: 3.0}, tuning: {name: last_blocks, blocks: 2}}
head: {name: linear}
manifold: {name: poincare, curvature: -0.5}
loss: {name: cross_batch_memory, size: 64, loss: {name: margin, miner: {name: distance_weighted}}}
regularizers: [{name: graph_consistency, weight: 0.1}]
sampler: {name: class_balanced, classes_per_batch: 4}
optimizer: {lr: 0.1, lr_multipliers: {loss: 10}}
schedule: {name: cosine, warmup_epochs: 1.0}
training: {epochs: 3, ema: 0.5}
metrics: [recall@1, {name: map_at_r}]
"""


def test_each_misspelled_key_and_name_gets_the_error_of_the_complete_check():
    found = 0
    for recipe in mistakes(yaml.safe_load(RICH)):
        text = json.dumps(recipe)
        errors = early(text)
        assert errors in ([], complete(text)), text
        found += bool(errors)
    assert found > 40  # of about 50; a component without its name is left to the complete check


@pytest.mark.parametrize(
    "text",
    [
        BASE + "optimizr: {lr: 1}\ntraining: {epoch: 3}\n",
        BASE + "loss_: 1\nseed: -1\n",  # the complete check knows what a seed may be
        BASE + "training: {epochs: two}\nlos: 1\n",
        "dataset: {name: glyph}\n",
        "loss: {name: tripplet}\n",
        "loss: triplet\ndataset: {name: glyph}\n",
        BASE + "regularizers: {name: x}\nx: 1\n",
        BASE + "sampler: {batch_size: 0}\nx: 1\n",
        BASE + "transform: null\nx: 1\n",
        BASE + "backbone: {name: resnet18, pooling: {name: gm}}\n",
        BASE + "metrics: [{name: recal}, map@r]\n",
        "",
        "[]",
        "dataset: null\nloss: {}\n",
        "dataset: {name: folder}\n",
    ],
)
def test_faults_are_those_of_the_complete_check_or_none(text: str):
    tree = parse_yaml(text, "r.yaml")
    errors = early(text) if isinstance(tree.data, dict) else []
    assert errors in ([], complete(text))
    assert complete(text)


def test_a_whole_recipe_is_checked_without_torch(tmp_path: Path, catalogue: str, monkeypatch: pytest.MonkeyPatch):
    """Without a catalogue the complete check is left to find the errors."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code = (
        "import sys; from pathlib import Path; from dmlkit.recipe.early import check_recipe\n"
        "try: check_recipe(Path('glyphs/triplet'), ['loss.margn=1', 'optimizer.name=adan'])\n"
        "except Exception as error: print(error)\nprint('torch' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False\n"
    monkeypatch.setenv("XDG_CACHE_HOME", catalogue)
    assert subprocess.check_output([sys.executable, "-c", code], text=True).splitlines() == [
        "--set loss.margn=1: loss.margn: unknown key; did you mean 'margin'?",
        "--set optimizer.name=adan: optimizer.name: unknown optimizer 'adan'; did you mean 'adam'? "
        "or load its file with --plugin FILE",
        "False",
    ]


def test_the_tree_stays(tmp_path: Path):
    tree = parse_yaml(RICH, "r.yaml")
    before = deepcopy(tree.data)
    NameCheck(tree, reference()).faults()
    assert tree.data == before
