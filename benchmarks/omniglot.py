"""Official one-shot task of Omniglot (Lake et al. 2015) with its minimal background sets, and published errors.

In each of 20 runs, 20 drawings are each to be found among 20 characters of the same alphabet, of which one drawing by
another person is known. A network trains on one of two sets of five other alphabets: 136 or 156 characters, each drawn
by 20 people. Published errors are those of the modified Hausdorff distance (the task's own demo), and of networks with
such sets (Lake et al. 2019, arXiv 1902.03477).

Rows that are not published are measured here: the mean error over the runs and, for a network, over both sets and three
seeds. The networks are those of `recipes/glyphs`, trained with `CHANGES`. No value was tuned for this task, or chosen
on it.

Run: python benchmarks/omniglot.py FOLDER [LOSS ...]. FOLDER is `python` of https://github.com/brendenlake/omniglot.
"""

import csv
import sys
import zipfile
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from report import write_report
from scipy.spatial.distance import cdist

import dmlkit
from dmlkit.distributed.launch import keep_freed_memory

RECIPES = Path(__file__).parent.parent / "recipes/glyphs"
SETS = ("images_background_small1", "images_background_small2")
LOSSES = ("proxy_anchor", "norm_softmax", "multi_similarity")
SEEDS = (0, 1, 2)
CHANGES = (
    "dataset.split=all",
    "transform={name: plain, size: 32, augment: [{name: random_affine, degrees: 10, translate: [0.1, 0.1], "
    "scale: [0.8, 1.2], shear: 10, fill: 255, interpolation: bilinear}]}",
    "training={epochs: 10, workers: 1}",
)
PUBLISHED = (
    ("modified Hausdorff distance", "38.8"),
    ("prototypical network", "30.1"),
    ("convolutional network", "23.2"),
    ("Bayesian program learning", "4.2"),
)


def run_files(run: Path) -> tuple[list[Path], list[Path]]:
    """Drawings to name, and the known drawing of the same character for each."""
    pairs = [line.split() for line in (run / "class_labels.txt").read_text(encoding="utf-8").splitlines()]
    questions, answers = zip(*pairs, strict=True)
    return [run.parent / name for name in questions], [run.parent / name for name in answers]


def error(similarity: NDArray[np.floating]) -> float:
    """Percentage of rows whose largest value is not on the diagonal."""
    return 100 * float((similarity.argmax(1) != np.arange(len(similarity))).mean())


def ink(path: Path) -> NDArray[np.floating]:
    """Positions (N, 2) of a drawing's pixels, relative to their mean."""
    with Image.open(path) as image:
        points = np.argwhere(np.asarray(image.convert("L")) == 0).astype(float)
    return points - points.mean(0)


def hausdorff(a: NDArray[np.floating], b: NDArray[np.floating]) -> float:
    """Modified Hausdorff distance (Dubuisson and Jain 1994): the larger of both mean distances to the nearest pixel."""
    distances = cdist(a, b)
    return max(distances.min(1).mean(), distances.min(0).mean())


def pixel_similarity(questions: list[Path], answers: list[Path]) -> NDArray[np.floating]:
    drawings = [[ink(path) for path in paths] for paths in (questions, answers)]
    return -np.array([[hausdorff(a, b) for b in drawings[1]] for a in drawings[0]])


def write_table(photos: Path, table: Path) -> None:
    """List all drawings of a background set with their characters."""
    with table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["path", "label"])
        writer.writerows([path, "/".join(path.parent.parts[-2:])] for path in sorted(photos.glob("*/*/*.png")))


def main(folder: Path, losses: list[str]) -> None:
    """Measure the distance of pixels, and networks that are trained by each loss."""
    keep_freed_memory()
    with TemporaryDirectory() as name:
        work = Path(name)
        for archive in ("one-shot-classification/all_runs.zip", *(f"{archive}.zip" for archive in SETS)):
            with zipfile.ZipFile(folder / archive) as file:
                file.extractall(work)
        runs = [run_files(run) for run in sorted(work.glob("run*"))]
        assert len(runs) == 20, f"{folder}: found {len(runs)} runs, expected 20"
        rows = [["modified Hausdorff distance", f"{fmean(error(pixel_similarity(*run)) for run in runs):.1f}", ""]]
        for loss in losses:
            errors = {part: [network_error(work, part, loss, seed, runs) for seed in SEEDS] for part in SETS}
            by_set = "; ".join(f"{part[-6:]} {' '.join(f'{value:.1f}' for value in errors[part])}" for part in SETS)
            rows.append([f"`{loss}`", f"{fmean(fmean(values) for values in errors.values()):.1f}", by_set])
    published = [[f"{method}, published", value, ""] for method, value in PUBLISHED]
    write_report("omniglot", __doc__, ["method", "error, %", "by set, each seed"], rows + published)


def network_error(work: Path, part: str, loss: str, seed: int, runs: list[tuple[list[Path], list[Path]]]) -> float:
    write_table(work / part, table := work / f"{part}.csv")
    run = work / f"{part}-{loss}-{seed}"
    changes = [f"dataset={{name: table, file: {table}}}", *CHANGES, f"seed={seed}"]
    dmlkit.train(RECIPES / f"{loss}.yaml", run, overrides=changes, device="cpu")
    model = dmlkit.load(run)
    errors = [error(model.similarity(model.embed(questions), model.embed(answers))) for questions, answers in runs]
    print(f"{loss}, {part}, seed {seed}: {fmean(errors):.2f} %", flush=True)
    return fmean(errors)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or list(LOSSES))
