"""Re-ranking: the time of k-reciprocal encoding compared with that of the exact search whose neighbors it ranks again.

Embeddings are those of benchmarks/evaluation.py: float32 unit vectors with 512 dimensions around class centers. Each
image is searched among all others, and R@1, R-Precision and MAP@R are computed. Both run in turn in one process with
one thread, three times. Times are CPU seconds, so that waiting for other programs does not count; `x search` is the
median of the ratios of the rounds, with the lowest and the highest. `GB` is by how much the memory of the process grows
at most, above the embeddings.

Run: python benchmarks/reranking.py [IMAGES...]
"""

import sys
from statistics import median
from time import process_time

import torch
from evaluation import SOP, embeddings, peak_memory
from report import write_report

from dmlkit.metrics import Labeled, score_retrieval
from dmlkit.metrics.ranking.rerank import KReciprocal, Rerank

ROUNDS = 3


def measure(count: int) -> list[list[str]]:
    """Time the search and k-reciprocal encoding of ``count`` images, with as many per class as the products have."""
    points, labels = embeddings(count, round(count * SOP[1] / SOP[0]), noise=3.0)
    methods: dict[str, Rerank | None] = {"search": None, "k_reciprocal": KReciprocal()}
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    memory: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(ROUNDS):
        for name, method in methods.items():
            start = process_time()
            memory[name].append(
                peak_memory(lambda method=method: score_retrieval(Labeled(points, labels), rerank=method))
            )
            seconds[name].append(process_time() - start)
    ratios = [encoding / plain for encoding, plain in zip(seconds["k_reciprocal"], seconds["search"], strict=True)]
    times = {"search": "1.00", "k_reciprocal": f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"}
    return [
        [f"{count:,} x 512", name, f"{median(seconds[name]):.1f}", times[name], f"{max(memory[name]):.2f}"]
        for name in methods
    ]


def main() -> None:
    torch.set_num_threads(1)
    sizes = [int(size) for size in sys.argv[1:]] or [10_000, SOP[0]]
    rows = [row for size in sizes for row in measure(size)]
    write_report("reranking", __doc__, ["embeddings", "what", "CPU seconds", "x search", "GB"], rows)


if __name__ == "__main__":
    main()
