"""What the pictures show: geodesics, centroids and projections, against geoopt and closed forms."""

from pathlib import Path

import geoopt
import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from dmlkit.manifolds import Lorentz, Poincare, Sphere
from dmlkit.plots.geometry import Mapped, color, draw_legend, plot_embeddings, with_room
from dmlkit.plots.planes import centroid, geodesics, lies_in_disk, principal_plane, to_unit_disk
from dmlkit.plots.split import ClassProxies
from tests.conftest import refuses


def test_geodesics_are_geoopts():
    ball = geoopt.PoincareBall()
    start, ends = torch.tensor([0.3, -0.5]), torch.tensor([[0.1, 0.8], [-0.6, 0.2]])
    arcs = geodesics(start, ends)
    for arc, end in zip(arcs, ends, strict=True):
        whole = ball.dist(start, end)
        through = ball.dist(start, arc.float()) + ball.dist(arc.float(), end)
        assert torch.allclose(through, whole.expand_as(through), atol=1e-4)
        assert torch.allclose(arc[-1].float(), end, atol=1e-6)


def test_the_centroid_of_a_symmetric_set_is_its_center():
    ball = geoopt.PoincareBall()
    center = torch.tensor([0.4, 0.2])
    around = ball.expmap(center.expand(4, 2), 0.1 * torch.tensor([[1.0, 0], [-1, 0], [0, 1], [0, -1]]))
    assert torch.allclose(centroid(around).float(), center, atol=1e-5)


@pytest.mark.parametrize("curvature", [-0.1, -4.0])
def test_both_models_land_in_the_same_disk(curvature: float):
    features = torch.randn(10, 2)
    ball, sheet = Poincare(2, curvature=curvature), Lorentz(2, curvature=curvature)
    inside = to_unit_disk(ball, ball.from_features(features))
    assert (inside.norm(dim=1) < 1).all()
    assert torch.allclose(inside, to_unit_disk(sheet, sheet.from_features(features)), atol=1e-4)


def test_the_principal_plane_keeps_the_distances_of_flat_data():
    sphere = Sphere(5)
    flat = torch.nn.functional.pad(sphere.from_features(torch.randn(20, 2)), (0, 3))
    plane = principal_plane(sphere, flat)
    assert torch.allclose(torch.cdist(plane, plane).float(), torch.cdist(flat, flat), atol=1e-3)


def test_the_disk_shows_hyperbolic_planes_alone_and_classes_have_distinct_colors():
    assert lies_in_disk(Poincare(2)) and lies_in_disk(Lorentz(2))
    assert not lies_in_disk(Poincare(3)) and not lies_in_disk(Sphere(2))
    assert len({color(position, 100) for position in range(100)}) == 100


def test_few_points_and_a_disk_of_more_dimensions_are_refused(tmp_path):
    for count, kind, message in ((3, "disk", "on poincare or lorentz, got 3-d on sphere"), (2, "pca", "at least 3")):
        shown = Mapped(torch.eye(3)[:count], torch.arange(count), ("a", "b", "c"))
        refuses(message, plot_embeddings, Sphere(3), shown, kind, tmp_path / "a.png", "test split")


def test_a_legend_leaves_no_class_out_w19():
    figure = Figure()
    axes = figure.subplots()
    draw_legend(figure, [axes.scatter([0], [0]) for _ in range(3)], ["_x", "$y$", "z\x07"])
    texts = figure.legends[0].get_texts()
    assert [text.get_text() for text in texts] == ["_x", "$y$", "z\\x07"]
    assert not any(text.get_parse_math() for text in texts)


def test_images_of_a_map_do_not_cover_each_other_and_dots_without_one_had_no_room():
    place = torch.rand(150, 2, dtype=torch.float64)
    room = 0.06
    kept = with_room(place, room)
    for index in range(150):
        near = [other for other in kept if other < index and bool((place[other] - place[index]).abs().max() <= room)]
        assert (index in kept) == (not near)


def test_a_map_of_images_with_proxies_is_written(tmp_path: Path):
    sphere, labels = Sphere(4), torch.arange(12) % 3
    image = np.zeros((8, 6, 3), dtype=np.uint8)
    proxies = ClassProxies(sphere.from_features(torch.randn(3, 4)), torch.arange(3))
    names = ("_x", "$\\frac$", "\x1b[31m" + 500 * "b")  # hidden, wrong or long for matplotlib
    shown = Mapped(sphere.from_features(torch.randn(12, 4)), labels, names, proxies, lambda _: image)
    plot_embeddings(sphere, shown, "pca", tmp_path / "map.SVG", "train split")
    alone = shown._replace(proxies=None, image=lambda index: image if index else None)  # one cannot be read
    plot_embeddings(sphere, alone, "pca", tmp_path / "other.svg", "train split")
    assert (tmp_path / "map.SVG").stat().st_size > (tmp_path / "other.svg").stat().st_size > 5000
