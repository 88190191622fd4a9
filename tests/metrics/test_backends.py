"""CPU, GPU code, manifolds, peers and ranks give the same figures."""

import socket
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator

from dmlkit.manifolds import Euclidean
from dmlkit.manifolds.base import ManifoldConfig
from dmlkit.metrics import Labeled, retrieval_metrics, score_retrieval, scoring
from dmlkit.metrics.ranking import cpu_search, gpu_search, rankings
from dmlkit.metrics.ranking.rankings import build_search
from dmlkit.metrics.ranking.search import Depth

NAMES = ["recall@1", "recall@10", "precision@5", "r_precision", "map@r", "map@10", "mrr", "ndcg@10"]


def embeddings(count: int, classes: int, dim: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(count + classes)
    labels = torch.arange(count) % classes
    centers = torch.randn(classes, dim, generator=generator)
    return centers[labels] + 1.5 * torch.randn(count, dim, generator=generator), labels


@pytest.mark.parametrize("classes", [4, 30, 90])  # rows are sorted, selected, counted
@pytest.mark.parametrize("depth", [Depth(5, True, False), Depth(300, False, False), Depth(0, False, True)])
def test_cpu_and_gpu_code_count_alike(classes, depth, monkeypatch):
    monkeypatch.setattr(gpu_search, "block_rows", lambda _: 50)  # not the same number of positives in each block
    points, labels = embeddings(300, classes)
    labels[:100] %= 4
    points = (points * 2).round()  # products of small integers: exact, with ties
    ids = torch.arange(300)
    search, _ = build_search((points, points), (labels, labels), (ids, ids))
    blocks = ids.split(128)
    pairs = zip(*(backend.standings(search, blocks, depth) for backend in (cpu_search, gpu_search)), strict=True)
    for ours, theirs in pairs:
        assert torch.equal(ours.scores, theirs.scores)
        assert torch.equal(ours.nearest, theirs.nearest)
        limit = torch.full((len(ours.above), 1), depth.fixed)
        if depth.to_r:
            limit = limit.maximum((theirs.scores > -torch.inf).sum(1, keepdim=True))
        for one, other in ((ours, theirs), (theirs, ours)):  # each may leave out what is below the depth
            known, other_known = one.above < 300, other.above < 300
            both = known & other_known
            assert torch.equal(one.above[both], other.above[both])
            assert torch.equal(one.reached[both], other.reached[both])
            assert ((other.above >= limit) | known | (other.scores[:, : known.shape[1]] == -torch.inf)).all()
            assert known[:, 0].all()


def test_cpu_and_gpu_code_agree_on_the_levels_of_a_hierarchy(monkeypatch):
    points, labels = embeddings(300, 24)
    points = (points * 2).round()  # with ties
    levels = {"family": labels // 8, "genus": labels // 2, "species": labels}
    names = ["recall@1", "map@r:genus", "mrr:family", "h_ap", "graded_ndcg@9"]
    sides = (points[:90], {name: codes[:90] for name, codes in levels.items()}), (points, levels)
    for arguments in ((points, levels), (*sides[0], *sides[1])):
        ours = retrieval_metrics(*arguments, manifold=Euclidean(16), metrics=names)
        with monkeypatch.context() as patch:
            patch.setattr(rankings, "cpu_search", gpu_search)
            patch.setattr(gpu_search, "block_rows", lambda _: 50)
            theirs = retrieval_metrics(*arguments, manifold=Euclidean(16), metrics=names)
        assert ours == pytest.approx(theirs, abs=1e-12)


@pytest.mark.parametrize("name", sorted(ManifoldConfig.variants))
def test_every_manifold_is_searched_by_its_similarity(name):
    features, labels = embeddings(120, 12, dim=6)
    manifold = ManifoldConfig.variants[name]().build(6).double()
    points = manifold.from_features(features.double() * 0.3)
    similarity = manifold.similarity(points, points).detach()
    similarity.fill_diagonal_(-torch.inf)
    order = similarity.argsort(1, descending=True)[:, :11]
    hits = labels[order] == labels[:, None]  # R = 9
    values = retrieval_metrics(points, labels, manifold=manifold, metrics=["recall@1", "r_precision", "precision@11"])
    assert values["recall@1"] == pytest.approx(hits[:, 0].double().mean().item(), abs=1e-12)
    assert values["r_precision"] == pytest.approx(hits[:, :9].double().mean().item(), abs=1e-12)
    assert values["precision@11"] == pytest.approx(hits.double().mean().item(), abs=1e-12)


def test_pytorch_metric_learning_agrees_where_it_is_right():
    points, labels = embeddings(500, 25)
    points = torch.nn.functional.normalize(points)
    calculator = AccuracyCalculator(
        include=("precision_at_1", "r_precision", "mean_average_precision_at_r", "mean_average_precision"),
        k="max_bin_count",
        device=torch.device("cpu"),
    )
    theirs = calculator.get_accuracy(points, labels)
    # In float64, because the rounding of a float32 product swaps one near tie of these points and not in FAISS.
    ours = retrieval_metrics(points.double(), labels, metrics=["precision@1", "r_precision", "map@r", "map@19:pml"])
    assert ours["precision@1"] == pytest.approx(theirs["precision_at_1"], abs=1e-9)
    assert ours["r_precision"] == pytest.approx(theirs["r_precision"], abs=1e-9)
    assert ours["map@r"] == pytest.approx(theirs["mean_average_precision_at_r"], abs=1e-9)
    assert ours["map@19:pml"] == pytest.approx(theirs["mean_average_precision"], abs=1e-9)


def _score_on_a_rank(rank: int, world: int, port: int, queue: "mp.SimpleQueue") -> None:
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    points, labels = embeddings(101, 10)
    scores = score_retrieval(Labeled(points, labels), metrics=NAMES, group=dist.group.WORLD)
    queue.put((rank, scores.values, scores.nearest.tolist()))
    dist.destroy_process_group()


@pytest.mark.heavy
def test_two_processes_equal_one():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    queue = mp.get_context("spawn").SimpleQueue()
    mp.spawn(_score_on_a_rank, (2, port, queue), nprocs=2)
    points, labels = embeddings(101, 10)
    alone = score_retrieval(Labeled(points, labels), metrics=NAMES)
    for _ in range(2):
        _, values, nearest = queue.get()
        assert values == alone.values
        assert nearest == alone.nearest.tolist()


def test_products_are_bounded():
    assert cpu_search.rows_of(60_502, threads=2) * 60_502 <= 2**25  # 128 MB a thread
    assert cpu_search.rows_of(10**9, threads=64) == 1


def test_more_ranks_than_queries_to_score_equal_one(monkeypatch: pytest.MonkeyPatch):
    """Threads stand for the ranks; of six queries two have a positive."""
    sides = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 0, 2, 3, 4])
    names = ["recall@1", "map", "cmc@1:cuhk03"]
    alone = score_retrieval(Labeled(*sides), metrics=names)
    barrier, given = Barrier(3), dict[int, torch.Tensor]()

    def all_gather(shares: list[torch.Tensor], own: torch.Tensor, group: int) -> None:
        given[group] = own
        barrier.wait()
        for rank, share in enumerate(shares):
            share.copy_(given[rank])
        barrier.wait()

    def score(rank: int) -> scoring.Scores:
        try:
            return score_retrieval(Labeled(*sides), metrics=names, group=rank)
        except Exception:
            barrier.abort()  # so that the others do not wait
            raise

    ranks = SimpleNamespace(get_rank=int, get_world_size=lambda _: 3, all_gather=all_gather)
    monkeypatch.setattr(scoring, "dist", ranks)
    with ThreadPoolExecutor(3) as pool:
        for scores in pool.map(score, range(3)):
            assert scores.values == alone.values and torch.equal(scores.nearest, alone.nearest)
