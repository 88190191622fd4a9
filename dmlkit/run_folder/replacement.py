"""Replacement of a run by a new one in the same folder.

The new run is written to `NEW`. When it has its first checkpoint, `take_over` removes the files of the old run and
moves the new ones into their place. Each step can be interrupted and resumed.
"""

from pathlib import Path

from dmlkit.files.lock import LOCK
from dmlkit.run_folder.documents import SPLITS

NEW = ".new"  # subfolder of the old run with the new run, until that has a checkpoint
MOVING = ".moving"  # subfolder with the new run after the old run was removed, until all files are moved

RUN_FILES = (
    *("recipe.yaml", "environment.json", "classes.json", "basis.json", "metrics.jsonl", "summary.json", "curves.png"),
    *("alignment.json", "test_classes.json"),
    *(f"untouched/{split}.{suffix}" for split in ("validation", "test") for suffix in ("npz", "json")),
    *(
        f"features/{split}/{name}"
        for split in SPLITS
        for name in ("features.json", "embeddings.npy", "items.parquet", "manifest.json")
    ),
    *("features/*/parts/*.safetensors", "features/*/parts/job.json"),
    *("checkpoints/best.pt", "checkpoints/last.pt"),
)
RUN_FOLDERS = (
    "untouched",
    *(f"features/{split}" for split in SPLITS),
    "features",
    "checkpoints",
)
# Files that other commands write into a run by default, all of them computed with the run's weights.
FILES_OF_EMBEDDINGS = (
    *("embeddings.npy", "items.parquet", "embeddings.parquet", "embeddings.npz", "index.*faiss*", "manifest.json"),
    *("parts/*.safetensors", "parts/job.json", LOCK),
    *(f"tensorboard/{name}" for name in ("tensors.bytes", "metadata.tsv", "projector_config.pbtxt")),
    f".*.{32 * '[0-9a-f]'}.partial",  # of a killed command, see `atomic_write`
)
DERIVED_FILES = (
    *("loggers.json", "tensorboard/events.out.tfevents.*"),
    *("threshold.json", "evaluations/*.json", "evaluations/*.npz", "exports/model.*", "exports/hub/*"),
    *("plots/*.png", "plots/*.svg", "plots/*.html", "threshold-local.json", "threshold-sift.json"),
    *(f"embeddings/*/{name}" for name in FILES_OF_EMBEDDINGS),
)


def take_over(folder: Path) -> None:
    """Replace the old run by a new one that has a checkpoint; continue a replacement that was interrupted."""
    new, moving = folder / NEW, folder / MOVING
    if not moving.exists():
        if not (new / "checkpoints" / "last.pt").exists():
            return
        remove_files(folder, (*RUN_FILES, *DERIVED_FILES))
        new.rename(moving)
    for name in RUN_FILES:  # last.pt is moved last: until then the run cannot be mistaken for a complete one
        if (moving / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (moving / name).replace(folder / name)
    remove_emptied(moving, [moving / name for name in RUN_FOLDERS])


def discard_new(folder: Path) -> None:
    """Remove a new run that has no checkpoint."""
    if (folder / NEW).exists():
        remove_files(folder / NEW, RUN_FILES)
        remove_emptied(folder / NEW, [folder / NEW / name for name in RUN_FOLDERS])


def remove_files(folder: Path, patterns: tuple[str, ...]) -> None:
    """Remove files, and the folders below that become empty; a folder with other files is kept."""
    files = {file for pattern in patterns for file in folder.glob(pattern)}
    for file in files:
        file.unlink()
    below = {parent for file in files for parent in file.parents if parent.is_relative_to(folder) and parent != folder}
    for parent in sorted(below, reverse=True):
        if not any(parent.iterdir()):
            parent.rmdir()


def remove_emptied(folder: Path, below: list[Path]) -> None:
    """Remove a folder and given folders in it if they are empty."""
    for empty in (*below, folder):
        if empty.is_dir() and not any(empty.iterdir()):
            empty.rmdir()
