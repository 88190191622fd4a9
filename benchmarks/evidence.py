"""`dmlkit eval --evidence` on glyphs with planted backgrounds: whether the figure recovers how much was planted.

Images of 120 x 120 pixels show a character of 28 pixels and a frame of stripes. In a share of the classes, the planted
strength, all images show the same white O, and the stripes have the color, direction and width of the class; in the
others the frame is plain, and the character and its color are those of the class. One small network (receptive field
32 pixels) is trained on 40 other classes, half of either kind, with stripes apart; 40 test classes of 8 images are made
for each strength. The boxes are those of the characters with 16 pixels on each side.

- `stripes`: `apart` begin 16 pixels outside of the box; `touching` begin at the box, so that the network sees them
  together with the character.
- `planted`: share of the classes; `retrieval`: share of map@r - chance that their queries have.
- `evidence`: the share of map@r that comes from outside the boxes, with its 95 % interval over classes; `whole`: map@r;
  `inside`, `outside`: map@r of images in which all but the box, or the box, is painted over.
- `recovered`: whether the interval contains the share of retrieval.

Run: python benchmarks/evidence.py FOLDER, an empty folder for 3 700 images and a run (5 minutes on one core).
"""

import csv
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from report import write_report

from dmlkit.datasets.glyphs import character_classes, render
from dmlkit.distributed.launch import start_ranks
from dmlkit.evaluation.evaluate import score_dataset
from dmlkit.look.evidence import evidence_of
from dmlkit.metrics.scoring import metric_configs
from dmlkit.run_folder.folder import RunFolder
from dmlkit.vectors.images import images_at
from dmlkit.vectors.stored import embed_files
from dmlkit.vectors.trained import load_model

SIDE, GLYPH, MARGIN, GAP = 120, 28, 16, {"apart": 16, "touching": 0}
TRAINED, TESTED, STRENGTHS = 40, 40, (0.0, 0.25, 0.5, 0.75, 1.0)
RECIPE = """\
dataset: {{name: folder, root: {root}, validation_fraction: 0.0}}
transform: {{name: plain, size: {side}}}
backbone: {{name: small_cnn, width: 16}}
embedding_dim: 64
loss: {{name: proxy_anchor}}
sampler: {{name: random, batch_size: 40}}
optimizer: {{name: adamw, lr: 2e-3, lr_multipliers: {{loss: 10}}}}
training: {{epochs: 12, workers: 0}}
metrics: [recall@1, map@r]
"""


def stripes(label: int, random: np.random.Generator) -> np.ndarray:
    """Return stripes (SIDE, SIDE, 3) of the color, direction and width of a class, with a random phase."""
    class_random = np.random.default_rng(label)
    color, angle, width = class_random.uniform(0.2, 1, 3), class_random.uniform(0, np.pi), class_random.uniform(4, 10)
    rows, columns = np.mgrid[:SIDE, :SIDE]
    wave = np.sin((np.cos(angle) * rows + np.sin(angle) * columns) * 2 * np.pi / width + random.uniform(0, 2 * np.pi))
    return 128 + 100 * wave[..., None] * color * random.uniform(0.8, 1)


def draw(label: int, image: int, character: str, *, is_planted: bool, gap: int) -> tuple[np.ndarray, list[int]]:
    """Return an image (SIDE, SIDE, 3) uint8 and the box of its character."""
    random = np.random.default_rng([label, image])
    pixels = stripes(label, random) if is_planted else np.full((SIDE, SIDE, 3), 128.0)
    edge = MARGIN + gap
    left, top = random.integers(edge + 8, SIDE - GLYPH - edge - 8, 2)
    pixels[top - edge : top + GLYPH + edge, left - edge : left + GLYPH + edge] = 128
    color = np.ones(3) if is_planted else np.random.default_rng(label).uniform(0.2, 1, 3)
    glyph = render(character, int(random.integers(1000)), GLYPH, 0, 0.0).reshape(GLYPH, GLYPH, 1)
    pixels[top : top + GLYPH, left : left + GLYPH] = glyph * color
    pixels += random.normal(0, 4, pixels.shape)
    box = [left - MARGIN, top - MARGIN, left + GLYPH + MARGIN, top + GLYPH + MARGIN]
    return pixels.clip(0, 255).astype(np.uint8), [int(side) for side in box]


def write_images(folder: Path, labels: range, images: int, planted: set[int], gap: int) -> None:
    """Write images of classes, one folder per class, and boxes.csv next to them."""
    characters = character_classes(2 * (TRAINED + TESTED), 1)
    rows = [["path", "x1", "y1", "x2", "y2"]]
    for label in labels:
        character = "O" if label in planted else characters[label][0]
        (folder / str(label)).mkdir(parents=True)
        for image in range(images):
            pixels, box = draw(label, image, character, is_planted=label in planted, gap=gap)
            name = f"{label}/{image}.png"
            Image.fromarray(pixels).save(folder / name)
            rows.append([f"{folder.name}/{name}", *map(str, box)])
    with (folder.parent / f"{folder.name}.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)


def figures(run: Path, folder: Path, planted: set[int]) -> list[str]:
    """Return the cells of a row on the images of a folder."""
    ranks = start_ranks("cpu")
    trained, dataset = load_model(RunFolder(run), ranks), images_at(folder)
    embeddings = embed_files(trained, ranks, dataset, str(folder))
    configs, points = metric_configs(["map@r"]), embeddings.points
    actual, chance = (
        score_dataset(embeddings._replace(points=vectors), dataset, trained.manifold, configs)
        for vectors in (points, points[:1].repeat(len(points), 1))
    )
    gain = actual.scores.per_query["map@r"] - chance.scores.per_query["map@r"]
    is_planted = torch.tensor([int(dataset.class_names[label]) in planted for label in actual.labels.tolist()])
    retrieval = float(gain[is_planted].sum() / gain.sum())
    result = evidence_of(trained, dataset, embeddings, "map@r", str(folder.parent / f"{folder.name}.csv"))
    assert result.share is not None and result.interval is not None
    low, high = result.interval
    return [
        f"{retrieval:.3f}",
        f"{result.share:.3f} ({low:.3f} to {high:.3f})",
        *(f"{value:.3f}" for value in (result.whole, result.inside, result.outside)),
        "yes" if low <= retrieval <= high else "no",
    ]


def main() -> None:
    (name,) = sys.argv[1:]
    root, rows = Path(name), list[list[str]]()
    train, run, recipe = root / "train", root / "run", root / "recipe.yaml"
    if not run.exists():
        write_images(train, range(TRAINED), 12, set(range(0, TRAINED, 2)), GAP["apart"])
        recipe.write_text(RECIPE.format(root=train, side=SIDE), encoding="utf-8")
        subprocess.run([sys.executable, "-m", "dmlkit", "train", str(recipe), "-o", str(run)], check=True)
    for stripe, gap in GAP.items():
        for strength in STRENGTHS:
            labels = range(TRAINED, TRAINED + TESTED)
            planted = set(labels[: round(strength * TESTED)])
            folder = root / f"{stripe}-{strength}"
            write_images(folder, labels, 8, planted, gap)
            rows.append([stripe, f"{strength:g}", *figures(run, folder, planted)])
            print(rows[-1], flush=True)
    header = ["stripes", "planted", "retrieval", "evidence", "whole", "inside", "outside", "recovered"]
    write_report("evidence", __doc__, header, rows)


if __name__ == "__main__":
    main()
