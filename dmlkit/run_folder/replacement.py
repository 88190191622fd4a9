"""Replacing a run: the new one grows beside the old one, and takes its place with its first checkpoint."""

from pathlib import Path

NEW = ".new"  # in the folder of the old run: the new one, until it has a checkpoint
MOVING = ".moving"  # the new one, while the old one is gone and the new one is not yet in its place

RUN_FILES = (
    *("recipe.yaml", "environment.json", "classes.json", "metrics.jsonl", "summary.json", "curves.png"),
    *(f"untouched/{split}.{suffix}" for split in ("validation", "test") for suffix in ("npz", "json")),
    *(
        f"features/{split}/{name}"
        for split in ("train", "validation", "test")
        for name in ("features.json", "embeddings.npy", "items.parquet", "manifest.json")
    ),
    *("features/*/parts/*.safetensors", "features/*/parts/job.json"),
    *("checkpoints/best.pt", "checkpoints/last.pt"),
)
RUN_FOLDERS = (
    "untouched",
    *(f"features/{split}" for split in ("train", "validation", "test")),
    "features",
    "checkpoints",
)
# What other commands write into a run by default, all of it made with the run's weights.
EMBEDDING_FILES = (
    *("embeddings.npy", "items.parquet", "embeddings.parquet", "embeddings.npz", "index.faiss", "index.items.parquet"),
    *("index.manifest.json", "manifest.json", "parts/*.safetensors", "parts/job.json", "tensorboard/tensors.bytes"),
    *("tensorboard/metadata.tsv", "tensorboard/projector_config.pbtxt"),
)
DERIVED_FILES = (
    *("loggers.json", "tensorboard/events.out.tfevents.*"),
    *("threshold.json", "evaluations/*.json", "evaluations/*.npz", "exports/model.*", "plots/*.png", "plots/*.svg"),
    *(f"embeddings/*/{name}" for name in EMBEDDING_FILES),
)


def is_being_replaced(folder: Path) -> bool:
    """Whether a new run grows here, or is about to take the place of an old one."""
    return (folder / NEW).exists() or (folder / MOVING).exists()


def take_over(folder: Path) -> None:
    """Put a new run that has a checkpoint in the place of the old one; after a kill in between, go on with that."""
    new, moving = folder / NEW, folder / MOVING
    if not moving.exists():
        if not (new / "checkpoints" / "last.pt").exists():
            return
        remove_files(folder, (*RUN_FILES, *DERIVED_FILES))
        new.rename(moving)
    for name in RUN_FILES:  # the last checkpoint comes last: until then the run cannot be taken for a whole one
        if (moving / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (moving / name).replace(folder / name)
    remove_emptied(moving, [moving / name for name in RUN_FOLDERS])


def discard_new(folder: Path) -> None:
    """Remove a new run that came to no checkpoint."""
    if (folder / NEW).exists():
        remove_files(folder / NEW, RUN_FILES)
        remove_emptied(folder / NEW, [folder / NEW / name for name in RUN_FOLDERS])


def remove_files(folder: Path, patterns: tuple[str, ...]) -> None:
    """Remove files, and the folders below that are empty then: where a file of somebody else's lies, both stay."""
    files = {file for pattern in patterns for file in folder.glob(pattern)}
    for file in files:
        file.unlink()
    below = {parent for file in files for parent in file.parents if parent.is_relative_to(folder) and parent != folder}
    for parent in sorted(below, reverse=True):
        if not any(parent.iterdir()):
            parent.rmdir()


def remove_emptied(folder: Path, below: list[Path]) -> None:
    """Remove a folder and folders in it, those that are empty."""
    for empty in (*below, folder):
        if empty.is_dir() and not any(empty.iterdir()):
            empty.rmdir()
