"""Cost of curved space: similarities with their gradients, and exact search.

Similarity: forward and backward pass for (180, 512) x (11 318, 512) float32 points, median of 20 interleaved rounds.
The ratio is relative to the cosine of unit vectors, which takes three matrix products that no method can avoid. An
(N, M, d) tensor would take 4 172 MB. geoopt creates this tensor, so it gets only 9 of the 180 queries.

Search: 1 000 queries in 100 000 points with 512 dimensions, in clusters, with norms from the origin to the boundary of
float32; median of 5 interleaved rounds. The ratio is relative to FAISS on the same index vectors. `exact` is the share
of queries whose neighbors are the same, in the same order, as those of a float64 search.
"""

import time
from collections.abc import Callable, Mapping
from statistics import median

import geoopt
import torch
from report import memory_rise, write_report
from torch import Tensor
from torch.nn.functional import normalize

from dmlkit.manifolds import Euclidean, Lorentz, Poincare, Sphere
from dmlkit.manifolds.base import Manifold
from dmlkit.nearest.search import Gallery

QUERIES, CLASSES, DIM = 180, 11_318, 512
Rows = list[list[str]]


def interleaved(runs: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median milliseconds of each, taken in turns so that all see the same disturbances."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if number:  # the first round warms up
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: median(values) for name, values in times.items()}


def similarity_step(manifold: Manifold, features: tuple[Tensor, Tensor]) -> Callable[[], object]:
    x, y = (manifold.from_features(part).detach().requires_grad_() for part in features)
    weight = torch.randn(len(x), len(y))

    def step() -> None:
        x.grad = y.grad = None
        manifold.similarity(x, y).backward(weight)

    return step


def geoopt_step(features: tuple[Tensor, Tensor]) -> Callable[[], object]:
    ball = geoopt.PoincareBall()
    x, y = (ball.expmap0(part).detach().requires_grad_() for part in (features[0][:9], features[1]))

    def step() -> None:
        x.grad = y.grad = None
        ball.dist(x[:, None], y).sum().backward()

    return step


def similarity_rows() -> Rows:
    torch.manual_seed(0)
    features = torch.randn(QUERIES, DIM), torch.randn(CLASSES, DIM)
    manifolds = {
        "sphere, cosine": Sphere(DIM),
        "euclidean, cosine": Euclidean(DIM, similarity="cosine"),
        "euclidean, negative distance": Euclidean(DIM),
        "poincare, negative distance": Poincare(DIM),
        "poincare, negative squared distance": Poincare(DIM, similarity="negative_squared_distance"),
        "poincare, origin cosine": Poincare(DIM, similarity="origin_cosine"),
        "lorentz, negative distance": Lorentz(DIM),
        "lorentz, negative squared distance": Lorentz(DIM, similarity="negative_squared_distance"),
        "lorentz, origin cosine": Lorentz(DIM, similarity="origin_cosine"),
    }
    runs = {name: similarity_step(manifold, features) for name, manifold in manifolds.items()}
    times = interleaved(runs, 20)
    geoopt_name = "geoopt PoincareBall.dist, 9 of the 180 queries"
    runs[geoopt_name] = geoopt_step(features)
    times |= interleaved({geoopt_name: runs[geoopt_name]}, 3)
    base = times["sphere, cosine"]
    return [
        [name, f"{times[name]:.1f}", f"{times[name] / base:.2f}", f"{memory_rise(run):.0f}", ""]
        for name, run in runs.items()
    ]


def spread(count: int, centers: Tensor) -> Tensor:
    """Clustered directions, lengths evenly from 0 to the boundary of the ball (atanh 0.996 = 3.1)."""
    directions = centers[torch.randint(len(centers), (count,))] + 0.5 * torch.randn(count, DIM)
    return normalize(directions, dim=1) * 3.3 * torch.rand(count, 1)


def exact_neighbors(manifold: Manifold, queries: Tensor, gallery: Tensor, k: int) -> Tensor:
    """By float64 differences, over 2k of a float64 product."""
    vectors = manifold.index_vectors(gallery.double(), "gallery").T
    neighbors: list[Tensor] = []
    for part in queries.double().split(50):
        candidates = (manifold.index_vectors(part, "query") @ vectors).topk(2 * k).indices.sort(dim=1).values
        similarity = manifold.paired_similarity(part[:, None], gallery[candidates].double())
        neighbors.append(candidates.gather(1, similarity.argsort(dim=1, descending=True, stable=True)[:, :k]))
    return torch.cat(neighbors)


def search_rows(name: str, manifold: Manifold, scale: float) -> Rows:
    import faiss

    torch.manual_seed(0)
    centers = torch.randn(1_000, DIM)
    gallery, queries = (manifold.from_features(scale * spread(count, centers)) for count in (100_000, 1_000))
    vectors = manifold.index_vectors(gallery, "gallery").numpy()
    plain = faiss.IndexFlatIP(vectors.shape[1])
    plain.add(vectors)
    query_vectors = manifold.index_vectors(queries, "query").numpy()
    ours = Gallery(manifold, gallery)
    exact = exact_neighbors(manifold, queries, gallery, 100)
    rows: Rows = []
    for k in (10, 100):
        runs = {"FAISS": lambda k=k: plain.search(query_vectors, k), "dmlkit": lambda k=k: ours.search(queries, k)}
        times = interleaved(runs, 5)
        neighbors = {
            "FAISS": torch.from_numpy(plain.search(query_vectors, k)[1]),
            "dmlkit": ours.search(queries, k).indices,
        }
        for tool, run in runs.items():
            share = (neighbors[tool] == exact[:, :k]).all(1).float().mean().item()
            ratio = times[tool] / times["FAISS"]
            label = f"{name} search, k={k}, {tool}"
            rows.append([label, f"{times[tool]:.0f}", f"{ratio:.2f}", f"{memory_rise(run):.0f}", f"{share:.1%}"])
    return rows


def main() -> None:
    rows = [
        *similarity_rows(),
        *search_rows("poincare", Poincare(DIM, clip_distance=None), 1),
        *search_rows("lorentz", Lorentz(DIM, clip_distance=None), 2),
    ]
    write_report("manifolds", __doc__, ["what", "ms", "ratio", "peak memory, MB", "exact"], rows)


if __name__ == "__main__":
    main()
