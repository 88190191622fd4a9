"""Every glyph recipe trains: an epoch of it on a miniature of its dataset."""

import json

import pytest

from tests.conftest import ROOT

RECIPES = sorted((ROOT / "recipes" / "glyphs").glob("*.yaml"))
MINIATURE = (
    "dataset.classes=80",
    "dataset.images_per_class=20",
    "dataset.size=16",
    "transform.size=16",
    "backbone.width=4",
    "embedding_dim=8",
    "training.epochs=1",
)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_glyph_recipes_train(dmlkit, recipe, tmp_path):
    options = [part for override in MINIATURE for part in ("--set", override)]
    result = dmlkit("train", recipe, "-o", tmp_path / "run", "--device", "cpu", *options)
    assert result.code == 0, result.err
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    # four validation classes: embeddings that collapse to a point find 1 in 4
    assert rows[0]["loss"] == rows[0]["loss"] and rows[0]["validation"]["recall@1"] > 0.3
