"""Evidence of place and time against formulas for one pair at a time."""

from math import asin, cos, exp, inf, log, nan, radians, sin, sqrt

import numpy as np
import pytest
import torch

from dmlkit.manifolds import Sphere
from dmlkit.metrics import Labeled, metrics_from_hits, score_retrieval
from dmlkit.nearest.place import Range, Sightings, evidence_of, kilometers
from dmlkit.nearest.rescore import Rescorer, rescored_rows


def haversine(one: tuple[float, float], other: tuple[float, float]) -> float:
    """Distance in km of two points in degrees."""
    (north, east), (north2, east2) = (tuple(map(radians, point)) for point in (one, other))
    half = sin((north2 - north) / 2) ** 2 + cos(north) * cos(north2) * sin((east2 - east) / 2) ** 2
    return 2 * 6371.0088 * asin(sqrt(half))


def naive_evidence(one: np.ndarray, other: np.ndarray, span: Range) -> float:
    """Evidence of two rows of latitude, longitude and days."""
    if np.isnan([*one, *other]).any():
        return 0.0
    distance = haversine((one[0], one[1]), (other[0], other[1]))
    sure = 0.99 * exp(-abs(one[2] - other[2]) / span.days)
    r, spread = span.kilometers, span.spread
    alike, unlike = (exp(-(distance**2) / (2 * width**2)) / width**2 for width in (r, spread))
    return log(1 - sure + sure * alike / unlike)


def sightings(rows: np.ndarray) -> Sightings:
    return Sightings.at(*(torch.from_numpy(column.copy()) for column in rows.T))


def test_known_distances():
    cities = np.array([[48.8566, 2.3522, 0], [51.5074, -0.1278, 0], [-33.8688, 151.2093, 0], [48.8566, 2.35221, 0]])
    found = kilometers(sightings(cities).places[:1], sightings(cities).places)
    assert found[1] == pytest.approx(343.6, abs=1) and found[2] == pytest.approx(16_960, rel=0.005)
    assert found.tolist() == pytest.approx([haversine((*cities[0, :2],), (*row[:2],)) for row in cities], abs=1e-4)
    across = sightings(np.array([[0, 179.9, 0], [0, -179.9, 0], [90, 0, 0], [90, 77, 0]], float))
    assert kilometers(across.places[0], across.places[1]) == pytest.approx(22.24, abs=0.01)  # over the date line
    assert kilometers(across.places[2], across.places[3]) < 1e-6  # the pole, whatever the longitude


@pytest.mark.parametrize("span", [Range(2.0, 4.0, 30.0), Range(0.5, 3.0, inf)])
def test_scores_and_metrics_are_those_of_a_loop(span: Range):
    generator = np.random.default_rng(0)
    rows = np.stack(
        [generator.normal(50, 0.02, 30), generator.normal(8, 0.02, 30), generator.uniform(0, 90, 30)], axis=1
    )
    rows[3, 0], rows[4, 2] = nan, nan
    points = torch.nn.functional.normalize(torch.randn(30, 4, generator=torch.Generator().manual_seed(0)), dim=1)
    where = sightings(rows)
    rescorer = Rescorer(evidence_of(where, span), 0.4)
    scores = rescored_rows(rescorer, Sphere(4), points, points)(torch.arange(30))
    expected = np.array([[naive_evidence(one, other, span) for other in rows] for one in rows])
    expected = 0.6 * (points @ points.T).double().numpy() + 0.4 * expected
    assert np.abs(scores.numpy() - expected).max() < 1e-6
    labels = torch.arange(30) % 5
    found = score_retrieval(Labeled(points, labels), metrics=["map@r"], rerank=rescorer)
    np.fill_diagonal(expected, -inf)
    order = np.argsort(-expected, axis=1)[:, :29]
    hits = labels[torch.from_numpy(order)] == labels[:, None]
    assert found.values == pytest.approx(metrics_from_hits(hits, torch.full((30,), 5), ["map@r"]))
