"""Galleries with patches: identification with and without `dmlkit gallery create --with local`.

The run is that of recipes/start/frozen_lite0.yaml at 160 pixels: a head on EfficientNet-Lite0 with ImageNet weights, on
photos whose classes are divided in half; a quarter of the training classes validate. At most 25 images of each test
class are drawn. In each division 28 of 41 test classes are enrolled with 10 images each (in general two thirds; half of
the images of a class with fewer than 20), their other images are asked, and the images of the remaining classes are
strangers. Each gallery is made twice, without and with patches, and calibrated with an FPIR of 0.05, on its own images
and on validation classes of the run; it has seen no stranger of the test.

- `FNIR`: share of the asked images that do not get their own label.
- `FPIR`: share of the strangers that get a label.
- `at FPIR 0.05`: FNIR at the probability that 5 % of the strangers of the test reach.
- `rank 1`: share of the asked images whose best guess is right, without a threshold.

Differences are paired, with 95 % intervals over test classes; those of the FPIR over classes of strangers.

Run: dmlkit train start/frozen_lite0 -o RUN --set dataset.root=PHOTOS --set transform.size=160
--set dataset.validation_fraction=0.25; python benchmarks/local_gallery.py RUN. PHOTOS are those of the Grocery Store
data set, one folder per product. DIVISIONS=N changes the number of divisions, 10 by default; the table is written after
each.
"""

import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from report import write_report

from dmlkit.distributed.launch import start_ranks
from dmlkit.evaluation.image_gallery import ImageGallery
from dmlkit.evaluation.second import choose_second
from dmlkit.gallery.change import add_images, create_gallery
from dmlkit.gallery.images import LabelledImage
from dmlkit.metrics.statistics import paired_comparison
from dmlkit.run_folder.folder import RunFolder
from dmlkit.vectors.fusion import ModelChoice

DIVISIONS, ENROLLED, ASKED, FPIR = int(os.environ.get("DIVISIONS", "10")), 10, 15, 0.05
NAMES = ("FNIR", "FPIR", "at FPIR 0.05", "rank 1")


def lowest_reached_by(values: np.ndarray, share: float) -> float:
    """Return the lowest threshold that at most a share of values (M,) reaches."""
    return float(np.nextafter(np.sort(values)[-1 - int(share * len(values) + 1e-9)], np.inf))


def main(run: Path) -> None:
    """Choose the weight on validation classes, and identify images of each division with both galleries."""
    images = RunFolder(run).recipe().dataset.build("test")
    labels, generator = images.labels.numpy(), np.random.default_rng(0)
    class_rows = [
        generator.permutation(np.flatnonzero(labels == code))[: ENROLLED + ASKED] for code in np.unique(labels)
    ]
    paths, names = [str(path) for path in images.paths], [images.class_names[code] for code in labels]
    on_cpu = ModelChoice(device="cpu")
    fusion = choose_second(run, Path("local"), ranks=start_ranks("cpu"))
    outcomes: dict[tuple[str, bool], list[np.ndarray]] = {
        (name, with_local): [] for name in NAMES for with_local in (False, True)
    }
    classes: dict[str, list[np.ndarray]] = {"asked": [], "strangers": []}
    for division in range(DIVISIONS):
        generator = np.random.default_rng(division)
        order = generator.permutation(len(class_rows))
        enrolled = [generator.permutation(class_rows[code]) for code in order[: round(len(class_rows) * 28 / 41)]]
        counts = [min(ENROLLED, len(rows) // 2) for rows in enrolled]
        known = np.concatenate([rows[:count] for rows, count in zip(enrolled, counts, strict=True)])
        queries = np.concatenate([rows[count:] for rows, count in zip(enrolled, counts, strict=True)])
        strangers = np.concatenate([class_rows[code] for code in order[len(enrolled) :]])
        classes["asked"].append(labels[queries])
        classes["strangers"].append(labels[strangers])
        for with_local in (False, True):
            with TemporaryDirectory() as folder:
                place = Path(folder) / "gallery"
                model = ModelChoice(fusion=fusion if with_local else None, device="cpu")
                create_gallery(run, None, place, model=model)
                add_images(place, [LabelledImage(paths[row], names[row]) for row in known], model=on_cpu)
                gallery = ImageGallery(place, device="cpu")
                gallery.calibrate(fpir=FPIR)
                answers = gallery.identify([paths[row] for row in np.concatenate([queries, strangers])])
            assert len(answers.answers) == len(queries) + len(strangers)
            true_labels = np.array([names[row] for row in queries])
            guesses = np.array([answer.guess for answer in answers.answers])
            answer_labels = np.array([answer.label for answer in answers.answers])
            probabilities = np.array([answer.probability for answer in answers.answers])
            right = guesses[: len(queries)] == true_labels
            floor = lowest_reached_by(probabilities[len(queries) :], FPIR)
            outcomes["FNIR", with_local].append(answer_labels[: len(queries)] != true_labels)
            outcomes["FPIR", with_local].append(answer_labels[len(queries) :] != "unknown")
            outcomes["at FPIR 0.05", with_local].append(~(right & (probabilities[: len(queries)] >= floor)))
            outcomes["rank 1", with_local].append(right)
        means = [
            f"{name} {outcomes[name, with_local][-1].mean():.3f}" for name in NAMES for with_local in (False, True)
        ]
        print(division, *means, flush=True)
        write_means(outcomes, classes, fusion.share if fusion else 0.0)


def write_means(
    outcomes: dict[tuple[str, bool], list[np.ndarray]], classes: dict[str, list[np.ndarray]], share: float
) -> None:
    """Write the means over the divisions so far, and their differences."""
    rows: list[list[str]] = []
    for name in NAMES:
        sides = [torch.from_numpy(np.concatenate(outcomes[name, with_local])).double() for with_local in (False, True)]
        codes = torch.from_numpy(np.concatenate(classes["strangers" if name == "FPIR" else "asked"]))
        change = paired_comparison(sides[0], sides[1], codes)
        ends = f"{change.low:+.3f} .. {change.high:+.3f}"
        rows.append([name, *(f"{side.mean():.3f}" for side in sides), f"{change.difference:+.3f}", ends])
    rows.append(["share of the matches", "", f"{share:.3f}", "", ""])
    header = [f"{len(classes['asked'])} divisions", "cosine", "with local", "difference", "95 % interval"]
    write_report("local_gallery", __doc__, header, rows)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
