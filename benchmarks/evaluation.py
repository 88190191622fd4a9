"""Evaluation: all metrics in one pass, compared with pytorch-metric-learning (PML) and FAISS.

Embeddings are float32 unit vectors with 512 dimensions around class centers. Values are medians; the tools run in turn
in one process. The floor of a search is the matrix product of its queries and its gallery, in blocks, by NumPy's BLAS.
"""

import logging
import os
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
import torch
from report import write_report

from dmlkit.metrics import retrieval_metrics
from dmlkit.metrics.clustering import kmeans

EVERYTHING = [
    "recall@1", "recall@2", "recall@4", "recall@8", "cmc@10", "precision@1", "precision@10",
    "r_precision", "map@r", "map@10", "mrr", "ndcg@10",
]  # fmt: skip
SOP = 60_502, 11_316
"""Images and classes of the test split of Stanford Online Products."""


def embeddings(count: int, classes: int, noise: float) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(count) % classes
    centers = torch.randn(classes, 512, generator=generator)[labels]
    points = centers + noise * torch.randn(count, 512, generator=generator)
    return torch.nn.functional.normalize(points, dim=1), labels


def product(queries: torch.Tensor, gallery: torch.Tensor) -> None:
    out = np.empty((1024, len(gallery)), np.float32)
    for block in queries.split(1024):
        np.dot(block.numpy(), gallery.numpy().T, out=out[: len(block)])


def timed(calls: dict[str, Callable[[], object]], runs: int) -> dict[str, float]:
    """Median seconds of each call, one after the other in each of ``runs`` rounds after a first."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(runs + 1):
        for name, call in calls.items():
            start = perf_counter()
            call()
            if turn or runs == 1:
                seconds[name].append(perf_counter() - start)
    return {name: median(values) for name, values in seconds.items()}


def peak_memory(call: Callable[[], object]) -> float:
    """GB that the process grows by at most while ``call`` runs, watched every 5 ms."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    done = threading.Event()
    before = highest = resident()

    def watch() -> None:
        nonlocal highest
        while not done.wait(0.005):
            highest = max(highest, resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    call()
    done.set()
    watcher.join()
    return (highest - before) / 1e9


def row(title: str, tool: str, seconds: float, floor: float | None, note: str = "") -> list[str]:
    return [title, tool, f"{seconds:.2f}", f"{seconds / floor:.2f}" if floor else "", note]


def search_of_6000(runs: int = 20) -> list[list[str]]:
    from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator

    points, labels = embeddings(6000, 100, noise=4.0)
    three = ("precision_at_1", "r_precision", "mean_average_precision_at_r")
    peers = {k: AccuracyCalculator(include=three, k=k, device=torch.device("cpu")) for k in (None, "max_bin_count")}
    times = timed(
        {
            "product": lambda: product(points, points),
            "three": lambda: retrieval_metrics(points, labels),
            "all": lambda: retrieval_metrics(points, labels, metrics=EVERYTHING),
            "pml": lambda: peers["max_bin_count"].get_accuracy(points, labels),
        },
        runs,
    )
    default = timed({"pml": lambda: peers[None].get_accuracy(points, labels)}, 1)["pml"]
    floor, title = times["product"], "6 000 x 512, 100 classes"
    return [
        row(title, "matrix product alone", floor, floor),
        row(title, "dmlkit, R@1 R-Precision MAP@R", times["three"], floor, f"{times['three'] / default:.2f} of PML"),
        row(title, f"dmlkit, {len(EVERYTHING)} metrics", times["all"], floor, f"{times['all'] / default:.2f} of PML"),
        row(title, "PML AccuracyCalculator, the three, default k", default, floor, "one run"),
        row(title, "PML, the three, k=max_bin_count", times["pml"], floor),
    ]  # fmt: skip


def search_of_products(runs: int = 1) -> list[list[str]]:
    points, labels = embeddings(*SOP, noise=3.0)
    grown = peak_memory(
        lambda: retrieval_metrics(points[:6050], labels[:6050], points, labels, metrics=["recall@1000"])
    )
    times = timed(
        {
            "product": lambda: product(points, points),
            "ours": lambda: retrieval_metrics(points, labels, metrics=["recall@1000"]),
        },
        runs,
    )
    floor, title = times["product"], "60 502 x 512, 11 316 classes"
    return [
        row(title, "matrix product alone", floor, floor),
        row(title, "dmlkit, R@1000", times["ours"], floor, f"{grown:.2f} GB above the embeddings"),
    ]


def tenth_of_products(runs: int = 5) -> list[list[str]]:
    import faiss

    points, labels = embeddings(*SOP, noise=3.0)
    ids = torch.arange(SOP[0])
    tenth = slice(0, SOP[0] // 10)
    arguments = (points[tenth], labels[tenth], points, labels)
    index = faiss.IndexFlatIP(512)
    index.add(points.numpy())

    def score(metrics: list[str]) -> object:
        return retrieval_metrics(*arguments, metrics=metrics, ids=(ids[tenth], ids))

    times = timed(
        {
            "product": lambda: product(points[tenth], points),
            "ours": lambda: score(["recall@1000"]),
            "all": lambda: score(["recall@1000", *EVERYTHING]),
            "faiss": lambda: index.search(points[tenth].numpy(), 1001),
        },
        runs,
    )
    floor, title = times["product"], "6 050 of these queries"
    return [
        row(title, "matrix product alone", floor, floor),
        row(title, "dmlkit, R@1000", times["ours"], floor),
        row(title, f"dmlkit, R@1000 and {len(EVERYTHING)} others", times["all"], floor),
        row(title, "FAISS IndexFlatIP, 1 001 neighbors", times["faiss"], floor),
    ]


def clustering(count: int, classes: int, iterations: int, runs: int) -> list[list[str]]:
    import faiss

    points, _ = embeddings(count, classes, noise=1.5)
    inertia: dict[str, float] = {}

    def ours() -> None:
        inertia["dmlkit"] = kmeans(points, classes, iterations=iterations).inertia

    def theirs() -> None:
        means = faiss.Kmeans(512, classes, niter=iterations, seed=1, min_points_per_centroid=1)
        means.train(points.numpy())
        inertia["FAISS"] = float(means.index.search(points.numpy(), 1)[0].sum())

    times = timed({"dmlkit": ours, "FAISS": theirs}, runs)
    title = f"k-means, {count:,} x 512, k={classes:,}, {iterations} iterations".replace(",", " ", 2)
    seeds = {"dmlkit": "k-means++ seeds", "FAISS": "random seeds"}
    return [row(title, f"{tool}, {seeds[tool]}", times[tool], None, f"inertia {inertia[tool]:.0f}") for tool in times]


PARTS: dict[str, Callable[[], list[list[str]]]] = {
    "small": search_of_6000,
    "tenth": tenth_of_products,
    "products": search_of_products,
    "kmeans-tenth": lambda: clustering(6050, 1131, 20, 5),
    "kmeans": lambda: clustering(*SOP, 20, 1),
}


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    rows = [line for name in sys.argv[1:] or PARTS for line in PARTS[name]()]
    header = ["what", "who", "seconds", "x product", "note"]
    write_report("evaluation", __doc__, header, rows)


if __name__ == "__main__":
    main()
