"""The panel of queries, against a loop over all images."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dmlkit.datasets.files.dataset import Dataset
from dmlkit.datasets.files.samples import VectorSamples
from dmlkit.files.image_file import BadImageError
from dmlkit.plots.retrieval import name_lines, nearest_of, other_queries, plot_retrieval, retrieval_panel
from dmlkit.plots.split import EmbeddedSplit
from dmlkit.vectors.progress_bar import no_bar
from tests.conftest import refuses
from tests.metrics.naive import at_rank


@pytest.fixture
def tested(tested: EmbeddedSplit) -> EmbeddedSplit:
    """Random points: of those of a network two may be as near to a third but for a rounding that versions differ in."""
    points = torch.randn(tested.points.shape, generator=torch.Generator().manual_seed(0))
    return replace(tested, points=torch.nn.functional.normalize(points, dim=1))


def similarities(embedded: EmbeddedSplit, query: int) -> list[float]:
    points = embedded.points.double()
    return [float(points[query] @ points[other]) for other in range(len(points))]


def average_precision_at_r(embedded: EmbeddedSplit, query: int) -> float:
    labels, near = embedded.labels.tolist(), similarities(embedded, query)
    order = sorted((row for row in range(len(labels)) if row != query), key=lambda row: -near[row])
    hits = [int(labels[row] == labels[query]) for row in order]
    return at_rank(hits, sum(hits), "map@r", 1)


def test_the_panel_is_that_of_a_loop(tested: EmbeddedSplit):
    panel = retrieval_panel(tested, 8, 5, no_bar)
    assert panel.worst == 4 and len(panel.queries) == 8 == len(set(panel.queries.tolist()))
    for row, query in enumerate(panel.queries.tolist()):
        near = similarities(tested, query)
        order = sorted((other for other in range(len(near)) if other != query), key=lambda other: -near[other])
        assert panel.neighbors[row].tolist() == order[:5]
        assert panel.similarities[row].tolist() == pytest.approx([near[other] for other in order[:5]])
        assert float(panel.values[row]) == pytest.approx(average_precision_at_r(tested, query), abs=1e-6)


def test_the_worst_half_is_the_worst_and_at_most_two_are_of_a_class(tested: EmbeddedSplit):
    panel = retrieval_panel(tested, 6, 2, no_bar)
    values = torch.tensor([average_precision_at_r(tested, query) for query in range(len(tested.points))])
    taken: list[int] = []
    for query in values.argsort(stable=True).tolist():
        if [int(tested.labels[other]) for other in taken].count(int(tested.labels[query])) < 2:
            taken.append(query)
        if len(taken) == 3:
            break
    assert sorted(panel.values[:3].tolist()) == pytest.approx(sorted(values[taken].tolist()), abs=1e-6)
    assert max(tested.labels[panel.queries[:3]].bincount().tolist()) <= 2


def test_the_other_half_is_random_but_the_same_each_time(tested: EmbeddedSplit):
    first, same = (retrieval_panel(tested, 8, 2, no_bar).queries.tolist() for _ in range(2))
    assert first == same and first[4:] != sorted(first[4:])


class Grouped(Dataset):
    """Points on a line, of two cameras."""

    def __init__(self, **kinds: Tensor) -> None:
        super().__init__(torch.tensor([0, 0, 1, 1]), ["a", "b"], ["0", "1", "2", "3"], **kinds)

    def sample(self, index: int) -> Tensor:
        return torch.zeros(3, 4, 4, dtype=torch.uint8)


def line(tested: EmbeddedSplit, dataset: Dataset) -> EmbeddedSplit:
    """Four points on the circle, in order."""
    angles = torch.tensor([0.0, 0.1, 0.3, 0.6])
    points = torch.nn.functional.pad(torch.stack([angles.cos(), angles.sin()], dim=1), (0, 6))
    return replace(tested, dataset=dataset, points=points, labels=dataset.labels, rows=torch.arange(4))


def test_a_group_of_its_own_and_what_is_no_gallery_are_not_found(tested: EmbeddedSplit):
    grouped = line(tested, Grouped(groups=torch.tensor([0, 0, 1, 2])))
    assert nearest_of(grouped, 0, torch.arange(4), 3)[1].tolist() == [2, 3, -1]
    apart = line(tested, Grouped(query=torch.tensor([True, True, False, False]), gallery=torch.ones(4).bool()))
    assert nearest_of(apart, 1, torch.tensor([0, 3]), 3)[1].tolist() == [0, 3, -1]


def test_few_queries_are_all_shown_once():
    assert sorted(other_queries(torch.tensor([2, 0]), 4, 8).tolist()) == [1, 3]


def test_an_image_that_is_gone_leaves_a_question_mark(tested: EmbeddedSplit, tmp_path: Path):
    class Gone(Grouped):
        def sample(self, index: int) -> Tensor:
            raise BadImageError("gone")

    gone = line(tested, Gone())
    assert gone.image(0, 8) is None
    panel = plot_retrieval(gone, tmp_path / "panel.svg", queries=2, neighbors=2)
    assert len(panel.queries) == 2 and (tmp_path / "panel.svg").stat().st_size > 2000


def test_vectors_have_no_panel(tested: EmbeddedSplit, tmp_path: Path):
    dataset = Grouped()
    dataset.kind = VectorSamples(8)
    arguments = line(tested, dataset), tmp_path / "panel.png"
    refuses(r"shows images, but .* embeds vectors", plot_retrieval, *arguments, queries=2, neighbors=2)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["Ginger", "Granny-Smith", "a b c d e f g h i j k", "x" * 21, "-" * 21])
def test_a_name_is_whole_in_two_lines(name: str):
    lines = name_lines(name, 11)
    assert "".join(lines) == name and max(map(len, lines)) <= 11
