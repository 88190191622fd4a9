"""One image from the shell: seconds of `dmlkit identify GALLERY one.jpg`, each in its own process.

The gallery has every fifth photo of PHOTOS; its model is EfficientNet-Lite0 with ImageNet weights and a head that was
trained for one epoch on glyphs. The gallery is not calibrated, so that the command also fits the probability of its
guesses, except in the exported gallery, which has it. Processes alternate; values are medians and minima over rounds,
without the first round, which reads from disk and fills caches. `CPU` is the median of the processor time.

- `modules`: what `python -c` imports, for comparison.
- `exported gallery`: the file that `dmlkit export GALLERY --format onnx` writes.

Run: python benchmarks/one_image.py PHOTOS
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from embed import some_of
from report import write_report

from dmlkit.embedding.fusion import ModelChoice
from dmlkit.embedding.gallery.change import create_gallery
from dmlkit.export.export import export
from dmlkit.files.image_file import image_files
from dmlkit.training.train import train

ROUNDS = 7
OVERRIDES = ["dataset={name: glyphs, classes: 20, images_per_class: 8}", "training.epochs=1", "sampler.batch_size=32"]


def measured(words: list[str]) -> tuple[float, float]:
    """Run a process; return its seconds and its processor time."""
    before, started = os.times(), time.perf_counter()
    subprocess.run([sys.executable, *words], capture_output=True, check=True)
    wall, after = time.perf_counter() - started, os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return wall, used


def main() -> None:
    (photos,) = sys.argv[1:]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        count = some_of(Path(photos), folder / "photos")
        train("start/frozen_lite0", folder / "run", overrides=OVERRIDES, device="cpu")
        create_gallery(folder / "run", folder / "photos", folder / "gallery", model=ModelChoice(device="cpu"))
        exported = str(export(folder / "gallery", "onnx").written[0])
        (image,) = (path for path in image_files(Path(photos))[1:2])
        ask = ["-m", "dmlkit", "identify"]
        calls = {
            "modules: none": ["-c", "pass"],
            "modules: numpy, Pillow, onnxruntime": ["-c", "import numpy, PIL.Image, onnxruntime"],
            "modules: torch": ["-c", "import torch"],
            "gallery, torch": [*ask, str(folder / "gallery"), image, "--device", "cpu"],
            "gallery, ONNX Runtime": [*ask, str(folder / "gallery"), image, "--device", "cpu+onnxruntime"],
            "exported gallery": [*ask, exported, image],
        }
        found: dict[str, list[tuple[float, float]]] = {call: [] for call in calls}
        for _ in range(ROUNDS + 1):
            for call, words in calls.items():
                found[call].append(measured(words))
    rows: list[list[str]] = []
    for call, times in found.items():
        walls, used = zip(*times[1:], strict=True)
        rows.append(
            [call, *(f"{value:.2f}" for value in (statistics.median(walls), min(walls), statistics.median(used)))]
        )
    about = f"{__doc__}\n{count:,} photos are in the gallery."
    write_report("one_image", about, ["process", "seconds, median", "seconds, minimum", "CPU"], rows)


if __name__ == "__main__":
    main()
