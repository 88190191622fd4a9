"""Protocols: what is trained and reported, and a kill half-way."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dmlkit.datasets.files.dataset import Dataset
from dmlkit.distributed.launch import start_ranks
from dmlkit.metrics import retrieval_metrics
from dmlkit.recipe.file import read_recipe
from dmlkit.run_folder.folder import RunFolder
from dmlkit.study import protocol
from dmlkit.study.protocol import fold_recipe, run_once
from dmlkit.training.progress import Silent
from dmlkit.vectors.in_memory import Embeddings, embed_dataset
from dmlkit.vectors.trained import load_model
from tests.conftest import TINY_RECIPE

RECIPE = TINY_RECIPE.replace("classes: 12", "classes: 32").replace("epochs: 3", "epochs: 2")


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(RECIPE)
    return path


def test_reality_check_trains_and_reports_what_it_says(recipe, tmp_path):
    # a recipe that otherwise trains on all classes: the protocol cuts its own fold for validation
    base, ranks = read_recipe(recipe, ["dataset.validation_fraction=0"]), start_ranks("cpu")
    figures = run_once("reality_check", base, tmp_path / "once", ranks, Silent)
    parts, separated = [], []
    for fold in range(4):
        run = RunFolder(tmp_path / "once" / f"fold-{fold}")
        trained = load_model(run, ranks, "best")
        assert (trained.recipe.seed, trained.recipe.dataset.fold) == (3, fold)
        assert trained.recipe == fold_recipe(trained.recipe, fold)
        images, transform = trained.recipe.dataset.build("test"), trained.recipe.transform
        embeddings = embed_dataset(ranks, trained.model, images, transform, workers=0)
        assert embeddings.points.shape == (16 * 6, 128)
        parts.append(embeddings.points.double().numpy())
        manifold = trained.model.manifold  # the default would normalize again, and swap near ties
        scores = retrieval_metrics(embeddings.points, embeddings.labels, manifold=manifold, metrics=["map@r"])
        separated.append(scores["map@r"])
        best = json.loads(run.summary_path.read_text())["best"]
        rows = run.read_metrics()
        assert best["validation"]["map@r"] == max(row.validation["map@r"] for row in rows)
    joined = np.concatenate([part / np.linalg.norm(part, axis=1, keepdims=True) for part in parts], 1)
    joined /= np.linalg.norm(joined, axis=1, keepdims=True)
    concatenated = retrieval_metrics(joined, embeddings.labels, metrics=["map@r"])["map@r"]
    assert figures["separated map@r"] == pytest.approx(np.mean(separated), abs=1e-9)
    assert figures["concatenated map@r"] == pytest.approx(concatenated, abs=5e-3)  # near ties of 96 queries
    assert {f"separated {name}" for name in ("precision@1", "r_precision", "map@r")} < set(figures)


class Photos(Dataset):
    def sample(self, index: int) -> torch.Tensor:
        return torch.zeros(3, 8, 8, dtype=torch.uint8)


def test_images_of_one_group_do_not_find_each_other_in_the_concatenation_either(recipe, tmp_path, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    labels, groups = torch.arange(5).repeat_interleave(6), torch.arange(15).repeat_interleave(2)
    parts = [10**fold * torch.randn(30, 4, generator=generator) for fold in range(4)]  # each has the same weight
    photos = Photos(labels, [*"abcde"], [f"{row}.jpg" for row in range(30)], groups=groups)
    dataset = SimpleNamespace(build=lambda _: photos, on_bad_image="error")
    of_run = SimpleNamespace(dataset=dataset, transform=None, training=SimpleNamespace(workers=0))
    embedded = iter([Embeddings(part, labels, torch.arange(30), []) for part in parts])
    monkeypatch.setattr(protocol, "_trained", lambda *_: {"precision@1": 0.5})
    monkeypatch.setattr(protocol, "load_model", lambda *_: SimpleNamespace(recipe=of_run, model=None))
    monkeypatch.setattr(protocol, "embed_dataset", lambda *_, **__: next(embedded))
    ranks = start_ranks("cpu")
    figures = run_once("reality_check", read_recipe(recipe), tmp_path, ranks, Silent)
    joined = np.concatenate([part / part.norm(dim=1, keepdim=True) for part in parts], 1)
    cosines = np.where(groups[:, None] == groups, -2, joined @ joined.T)
    assert figures["concatenated precision@1"] == pytest.approx(np.mean((labels[cosines.argmax(1)] == labels).numpy()))
