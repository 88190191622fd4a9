"""The protocol of Market-1501 from its folders to CMC and mAP, against a loop over names of files."""

from pathlib import Path
from typing import Any

import pytest
import torch

from dmlkit.distributed.launch import start_fabric
from dmlkit.evaluation.evaluate import SecondScoring, evaluate, score_split
from dmlkit.metrics.ranking.rerank import KReciprocal, ReciprocalGallery
from dmlkit.model import build_model
from dmlkit.recipe.schema import Recipe
from dmlkit.vectors.in_memory import embed_dataset
from dmlkit.vectors.trained import TrainedModel
from tests.datasets import trees

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
    for number, name in enumerate(names):
        trees.photo(home / name, number)
    return home


def by_names(scores: torch.Tensor, queries: list[str], items: list[str]) -> tuple[dict[str, float], int]:
    """Rank-1, rank-5 and mAP as the data set's authors compute them, and the number of queries left out."""
    firsts, fives, precisions, left_out = list[float](), list[float](), list[float](), 0
    for query, row in zip(queries, scores.tolist(), strict=True):
        person, camera = query.split("/")[-1].split("_")[:2]
        hits = list[bool]()
        for place in sorted(range(len(items)), key=lambda place: -row[place]):
            other, seen_by = items[place].split("/")[-1].split("_")[:2]
            if (other, seen_by[:2]) != (person, camera[:2]):  # otherwise junk of the query's own camera
                hits.append(other == person)
        if not any(hits):
            left_out += 1
            continue
        firsts.append(hits[0])
        fives.append(any(hits[:5]))
        ranks = [rank for rank, hit in enumerate(hits, 1) if hit]
        precisions.append(sum(count / rank for count, rank in enumerate(ranks, 1)) / len(ranks))
    means = [sum(values) / len(values) for values in (firsts, fives, precisions)]
    return dict(zip(("cmc@1", "cmc@5", "map"), means, strict=True)), left_out


def test_cmc_and_map_with_and_without_re_ranking(market: Path):
    options: dict[str, Any] = {
        "dataset": {"name": "table", "file": str(market), "validation_fraction": 0.0},
        "loss": {"name": "norm_softmax"},
        "metrics": ({"name": "cmc", "k": (1, 5)}, {"name": "map"}),
        "training": {"select_by": "map", "workers": 0},
    }
    recipe, method = Recipe.model_validate(options), KReciprocal(k1=6, k2=3)
    dataset, fabric = recipe.dataset.build("test"), start_fabric("cpu")
    torch.manual_seed(0)
    model = build_model(recipe).eval()
    embeddings = embed_dataset(fabric, model, dataset, recipe.transform, workers=0)
    trained = TrainedModel.of(recipe, model)
    found = score_split(fabric, trained, embeddings, dataset, split="test", second=SecondScoring(rerank=method))
    assert dataset.query is not None and dataset.gallery is not None and found.alternative is not None
    names = [Path(dataset.key(index)).name for index in range(len(dataset))]
    queries, items = ([names[row] for row in side.nonzero()[:, 0]] for side in (dataset.query, dataset.gallery))
    x, y = embeddings.points[dataset.query], embeddings.points[dataset.gallery]
    plain, left_out = by_names(x @ y.T, queries, items)
    assert (len(queries), len(items), left_out) == (13, 44, 1)
    assert found.scores.values == pytest.approx(plain, abs=1e-9) and found.scores.left_out == 1
    reranked, _ = by_names(ReciprocalGallery(model.manifold, y, method).scores(x), queries, items)
    assert found.alternative.values == pytest.approx(reranked, abs=1e-9) and reranked != plain
    assert "1 of 13 queries are left out" in found.scores.notes[0]
    junk = [note for note in found.scores.notes if "in their own group alone" in note]
    assert junk == ["all of them have images of their class in their own group alone, so they are not scored"]
    assert evaluate(fabric, model, dataset, recipe, split="test").scores.values == found.scores.values
