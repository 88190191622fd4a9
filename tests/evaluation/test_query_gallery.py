"""Evaluating datasets whose queries search a gallery: against a loop over the images."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dmlkit.distributed.launch import start_fabric
from dmlkit.evaluation.evaluate import evaluate
from dmlkit.evaluation.report import Report
from dmlkit.model import build_model
from dmlkit.recipe.schema import Recipe
from dmlkit.vectors.in_memory import embed_dataset
from tests.datasets import trees


def recipe_of(dataset: dict[str, Any]) -> Recipe:
    return Recipe.model_validate(
        {
            "dataset": {"validation_fraction": 0.0, **dataset},
            "loss": {"name": "proxy_anchor"},
            "metrics": ({"name": "recall", "k": (1,)},),
            "training": {"select_by": "recall@1", "workers": 0},
        }
    )


def overlapping(root: Path) -> dict[str, Any]:
    """A table in which images are query, gallery, both or neither."""
    lines = ["path,label,split,query,gallery"]
    roles = ["true,false", "false,true", "true,true", "false,false", "true,true", "false,true"]
    for index in range(24):
        trees.photo(root / f"{index}.jpg", index)
        split = "train" if index < 6 else "test"
        lines.append(f"{index}.jpg,{index // 6},{split},{',' if split == 'train' else roles[index % 6]}")
    (root / "table.csv").write_text("\n".join(lines))
    return {"name": "table", "file": str(root / "table.csv")}


def in_shop(root: Path) -> dict[str, Any]:
    return {"name": "inshop", "root": str(trees.inshop(root))}


@pytest.mark.parametrize("make", [overlapping, in_shop])
def test_queries_search_the_gallery_alone(make: Callable[[Path], dict[str, Any]], tmp_path: Path):
    recipe = recipe_of(make(tmp_path))
    dataset = recipe.dataset.build("test")
    torch.manual_seed(0)
    model, fabric = build_model(recipe).eval(), start_fabric("cpu")
    report = Report.of(evaluate(fabric, model, dataset, recipe, split="test"), "run", "test")
    points = embed_dataset(fabric, model, dataset, recipe.transform, workers=0).points
    assert dataset.query is not None and dataset.gallery is not None
    hits = []
    for query in dataset.query.nonzero()[:, 0].tolist():
        others = [index for index in dataset.gallery.nonzero()[:, 0].tolist() if index != query]
        if any(dataset.labels[index] == dataset.labels[query] for index in others):
            nearest = max(others, key=lambda index: float(points[query] @ points[index]))
            hits.append(bool(dataset.labels[nearest] == dataset.labels[query]))
    assert report.queries == len(hits)
    assert report.metrics["recall@1"] == pytest.approx(sum(hits) / len(hits))
