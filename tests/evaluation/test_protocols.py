"""Groups, queries and a gallery, Market-1501, stored forms and names of runs, against loops."""

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dmlkit.datasets.files.dataset import Dataset
from dmlkit.distributed.launch import Ranks, start_ranks
from dmlkit.evaluation.compare import short_names
from dmlkit.evaluation.evaluate import SecondScoring, evaluate, score_dataset, score_split
from dmlkit.evaluation.run import _with_ranges as with_ranges
from dmlkit.manifolds import Poincare, Sphere
from dmlkit.metrics import metric_configs, retrieval_metrics
from dmlkit.metrics.ranking.codec import Codec, Stored
from dmlkit.metrics.ranking.rerank import KReciprocal, ReciprocalGallery
from dmlkit.model import build_model
from dmlkit.recipe.schema import Recipe
from dmlkit.vectors.in_memory import Embeddings, embed_dataset
from dmlkit.vectors.progress_bar import no_bar
from dmlkit.vectors.trained import TrainedModel
from tests.conftest import Cli
from tests.datasets import trees
from tests.metrics.test_protocols import RANKS
from tests.metrics.test_protocols import market as by_its_rule
from tests.vectors.stored import split_of

METRICS = ("recall@1", "recall@5", "map@r", "eer")


class Labelled(Dataset):
    """Labels alone."""

    def sample(self, index: int) -> Tensor:
        raise NotImplementedError


def by_hand(similarity: Tensor, labels: Tensor, groups: Tensor, query: Tensor, gallery: Tensor) -> dict[str, Any]:
    """Each query against each item that is neither itself nor of its group."""
    firsts, fives, precisions, left_out, nearest = [], [], [], 0, []
    same, different = [], []
    for one in query.nonzero()[:, 0].tolist():
        others = [other for other in gallery.nonzero()[:, 0].tolist() if other != one and groups[other] != groups[one]]
        others.sort(key=lambda other: -similarity[one, other].item())
        hits = [bool(labels[other] == labels[one]) for other in others]
        for other, hit in zip(others, hits, strict=True):
            (same if hit else different).append(similarity[one, other].item())
        total = sum(hits)
        if total == 0:
            left_out += 1
            continue
        firsts.append(hits[0])
        fives.append(any(hits[:5]))
        precisions.append(sum(sum(hits[: rank + 1]) / (rank + 1) for rank in range(total) if hits[rank]) / total)
        nearest.append(int(labels[others[0]]))
    means = {name: sum(values) / len(values) for name, values in (("recall@1", firsts), ("recall@5", fives))}
    return {**means, "map@r": sum(precisions) / len(precisions), "left_out": left_out, "nearest": nearest} | {
        "eer": equal_error(torch.tensor(same), torch.tensor(different))
    }


def equal_error(same: Tensor, different: Tensor) -> float:
    """Where the shares of wrongly accepted and wrongly refused pairs meet, between two thresholds on a line."""
    thresholds = torch.cat([same, different]).unique().flip(0)
    accepted = torch.tensor([0.0, *((different >= threshold).double().mean().item() for threshold in thresholds)])
    refused = torch.tensor([1.0, *((same < threshold).double().mean().item() for threshold in thresholds)])
    place = int((accepted >= refused).nonzero()[0])
    gap, before = accepted[place] - refused[place], refused[place - 1] - accepted[place - 1]
    share = before / (before + gap)
    return float(accepted[place - 1] + share * (accepted[place] - accepted[place - 1]))


@pytest.mark.parametrize("searches", [False, True], ids=["all", "query and gallery"])
def test_a_query_never_finds_its_own_group(searches: bool):
    manifold, generator = Poincare(4), torch.Generator().manual_seed(0)
    labels = torch.randint(8, (90,), generator=generator)
    groups = labels * 100 + torch.randint(3, (90,), generator=generator)  # some cameras of a class
    groups[::5] = 7  # one of images of all classes
    groups[:12] = 10_000 + torch.arange(12)  # and images of none
    centers = torch.randn(8, 4, generator=generator)
    points = manifold.from_features(centers[labels] + torch.randn(90, 4, generator=generator))
    query = gallery = None
    if searches:
        query, gallery = (torch.rand(90, generator=generator) < share for share in (0.4, 0.8))
    data = Labelled(labels, tuple("abcdefgh"), list(map(str, range(90))), query=query, gallery=gallery, groups=groups)
    indices = torch.arange(90)[torch.arange(90) != 33]  # an image that could not be read
    embedded = Embeddings(points[indices], labels[indices], indices, [])
    scored = score_dataset(embedded, data, manifold, metric_configs(METRICS))
    every = torch.ones(90, dtype=torch.bool)
    masks = [(every if mask is None else mask).clone() for mask in (query, gallery)]
    for mask in masks:
        mask[33] = False
    similarity = manifold.paired_similarity(points[:, None].double(), points.double())
    expected = by_hand(similarity, labels, groups, *masks)
    for name in METRICS:
        assert scored.scores.values[name] == pytest.approx(expected[name], abs=1e-6), name
    assert scored.scores.left_out == expected["left_out"] and scored.nearest_labels.tolist() == expected["nearest"]
    plain = Labelled(labels, tuple("abcdefgh"), list(map(str, range(90))), query=query, gallery=gallery)
    alone = Labelled(
        labels, tuple("abcdefgh"), plain.paths, query=query, gallery=gallery, groups=torch.arange(90)
    )  # each in a group of its own: as if there were none
    values = [score_dataset(embedded, one, manifold, metric_configs(METRICS)).scores.values for one in (plain, alone)]
    assert values[0] == pytest.approx(values[1], abs=1e-12) and values[0] != scored.scores.values


PEOPLE, CAMERAS = range(2, 9), range(1, 4)


@pytest.fixture(scope="module")
def market(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders in which person 8 is in the gallery from the camera of its query alone, and some images are junk."""
    home, names = tmp_path_factory.mktemp("market"), list[str]()
    for person in PEOPLE:
        for camera in CAMERAS if person < 8 else [1]:
            names += [f"bounding_box_test/{person:04}_c{camera}s1_{shot:06}_01.jpg" for shot in range(2)]
            names += [f"query/{person:04}_c{camera}s1_000009_00.jpg"] * (camera < 3)
    names += [f"bounding_box_train/{person:04}_c{shot}s1_{shot:06}_01.jpg" for person in (1, 9) for shot in range(3)]
    names += [
        f"bounding_box_test/{person}_c{shot % 3 + 1}s2_{shot:06}_01.jpg"
        for person in ("-1", "0000")
        for shot in range(6)
    ]
    trees.photos(home, names)
    return home


def test_cmc_and_map_with_and_without_re_ranking(market: Path):
    options: dict[str, Any] = {
        "dataset": {"name": "table", "file": str(market), "validation_fraction": 0.0},
        "loss": {"name": "norm_softmax"},
        "metrics": ({"name": "cmc", "k": RANKS}, {"name": "map"}),
        "training": {"select_by": "map", "workers": 0},
    }
    recipe, method = Recipe.model_validate(options), KReciprocal(k1=6, k2=3)
    dataset, ranks = recipe.dataset.build("test"), start_ranks("cpu")
    torch.manual_seed(0)
    model = build_model(recipe).eval()
    embeddings = embed_dataset(ranks, model, dataset, recipe.transform, workers=0)
    trained = TrainedModel.of(recipe, model)
    scored = score_split(ranks, trained, embeddings, dataset, split="test", second=SecondScoring(rerank=method))
    assert dataset.query is not None and dataset.gallery is not None and scored.alternative is not None
    names = np.array([Path(dataset.key(index)).name.split("_")[:2] for index in range(len(dataset))])
    sides = [names[side.numpy()] for side in (dataset.query, dataset.gallery)]
    people, cameras = [side[:, 0] for side in sides], [side[:, 1].astype("U2") for side in sides]
    x, y = embeddings.points[dataset.query], embeddings.points[dataset.gallery]
    plain, left_out = by_its_rule((x @ y.T).numpy(), people, cameras)
    assert (*map(len, sides), left_out) == (13, 44, 1)
    assert scored.scores.values == pytest.approx(plain, abs=1e-9) and scored.scores.left_out == 1
    reranked, _ = by_its_rule(ReciprocalGallery(model.manifold, y, method).scores(x).numpy(), people, cameras)
    assert scored.alternative.values == pytest.approx(reranked, abs=1e-9) and reranked != plain
    assert "1 of 13 queries are left out" in scored.scores.notes[0]
    junk = [note for note in scored.scores.notes if "in their own group alone" in note]
    assert junk == ["all of them have images of their class in their own group alone, so they are not scored"]
    assert evaluate(ranks, model, dataset, recipe, split="test").scores.values == scored.scores.values


def test_points_say_what_limits_searches_of_their_run_alone(trained_run: Path, tmp_path: Path, dmlkit: Cli):
    names = [f"{label}{shot}.png" for label in "ab" for shot in range(4)]
    trees.photos(tmp_path, names)
    table, points, gallery = tmp_path / "table.csv", tmp_path / "points", tmp_path / "gallery"
    rows = [f"{name},{name[0]},test,{int(name[1]) < 1},{int(name[1]) > 0},{name[1]}" for name in names]
    table.write_text("\n".join(["path,label,split,query,gallery,group", *rows]))
    dmlkit("gallery", "create", trained_run, table, "-o", gallery)
    dataset = ("--set", f"dataset={{name: table, file: {table}}}")
    dmlkit("embed", trained_run, "--split", "test", *dataset, "-o", points)
    evaluate: Any = ("--metric", "recall@1", "--json")
    of_run = dmlkit("eval", trained_run, *dataset, *evaluate).json()
    note = "not used here, unlike in dmlkit eval of the run: query, gallery, group of the images"
    assert of_run["queries"] == 2 and note not in of_run["notes"]
    for source in (points, gallery):
        report = dmlkit("eval", source, *evaluate).json()
        assert report["queries"] == 8 and note in report["notes"]


def test_vectors_say_what_limits_searches_of_a_recipe_alone(tmp_path: Path, dmlkit: Cli):
    rows = [f"{n % 5},{n + 1},{n % 3},{'ab'[n % 2]},test,{int(n < 2)},{int(n > 1)},{n % 4}" for n in range(12)]
    vectors, recipe = tmp_path / "x.csv", tmp_path / "recipe.yaml"
    vectors.write_text("\n".join(["e0,e1,e2,label,split,query,Gallery,group", *rows]))
    recipe.write_text(
        f"dataset: {{name: vectors, embeddings: {vectors}}}\nbackbone: {{name: identity}}\nhead: {{name: none}}\n"
        "embedding_dim: 3\nloss: {name: proxy_anchor}\nsampler: {name: random, batch_size: 2}\n"
    )
    recipes = "a recipe with these vectors as dataset"
    note = f"not used here, unlike in dmlkit eval of {recipes}: query, gallery, group of the images"
    of_recipe = dmlkit("eval", recipe, "--metric", "recall@1", "--json").json()
    assert of_recipe["queries"] == 2 and note not in of_recipe["notes"]
    report = dmlkit("eval", vectors, "--metric", "recall@1", "--json").json()
    assert report["queries"] == 12 and note in report["notes"]
    some = dmlkit("eval", vectors, "--metric", "recall@1", "--where", "group in 1, 2", "--json").json()
    assert some["queries"] == 6 and note in some["notes"]


def test_the_ranges_of_int8_are_those_of_training(trained_run: Path, tmp_path: Path, dmlkit: Cli):
    run = shutil.copytree(trained_run, tmp_path / "run")
    words: Any = ("eval", run, "--form", "4:int8", "--metric", "map@r", "--device", "cpu", "--json")
    report = dmlkit(*words).json()
    assert "int8: the ranges of the coordinates are those of the training split" in report["notes"]
    (train, test), labels = (split_of(run, name).points for name in ("train", "test")), split_of(run).labels
    codecs = [Codec(Sphere(8), Stored(4, "int8"), ranges) for ranges in (train, test)]
    expected, other = (
        retrieval_metrics(codec.decode(test), labels, manifold=codec.space, metrics=["map@r"])["map@r"]
        for codec in codecs
    )
    assert report["forms"][0]["metrics"]["map@r"] == pytest.approx(expected) != pytest.approx(other)


def test_the_first_rank_embeds_the_ranges_of_int8_alone_since_the_others_have_ended(monkeypatch: pytest.MonkeyPatch):
    asked: list[Ranks] = []

    def embedded(run: Any, model: Any, ranks: Ranks, *_: Any, **__: Any) -> Embeddings:
        asked.append(ranks)
        return Embeddings(torch.ones(1, 2), torch.zeros(1), torch.zeros(1), [])

    monkeypatch.setattr("dmlkit.evaluation.run.split_embeddings", embedded)
    dataset = Labelled(torch.tensor([0, 0, 1, 1]), ["a", "b"], [f"{row}.jpg" for row in range(4)])
    points = Sphere(2).from_features(torch.randn(4, 2))
    evaluation = score_dataset(
        Embeddings(points, dataset.labels, torch.arange(4), []), dataset, Sphere(2), metric_configs(["map@r"])
    )
    model: Any = SimpleNamespace(recipe=SimpleNamespace(dataset=SimpleNamespace(build=lambda _: dataset)))
    run: Any = None
    rescoring = with_ranges(evaluation, run, model, replace(start_ranks("cpu"), world_size=2), no_bar).rescoring
    assert rescoring.ranges().tolist() == [[1.0, 1.0]]
    assert [ranks.world_size for ranks in asked] == [1]


@pytest.mark.parametrize(
    "names",
    [
        ["runs/a", "runs/b"],
        ["x/grocery_tuned_mpa", "y/grocery_tuned_mpa"],
        ["grocery_tuned_mpa_of_2025_03", "grocery_tuned_mpa_of_2025_04"],
        ["a_name_that_is_long_and_ends_in_1", "b"],
    ],
)
def test_names_are_cut_to_what_tells_them_apart(names: list[str]):
    assert [len(name) <= 15 for name in short_names(names, 14)] == [True] * len(names)
    assert len(set(short_names(names, 14))) == len(names)


@given(st.lists(st.text("ab_/-", min_size=1, max_size=30), min_size=2, max_size=5, unique=True), st.integers(8, 20))
def test_cut_names_are_apart(names: list[str], width: int):
    apart = len({Path(name).resolve() for name in names}) == len(names)
    assert not apart or len(set(short_names(names, width))) == len(names)
