"""Replacement of a run by a new one in the same folder.

The new run is written to `NEW`. When it has its first checkpoint, `take_over` removes the old run and moves the new one
into its place. Each step can be interrupted and resumed.
"""

import shutil
from pathlib import Path

NEW = ".new"  # subfolder of the old run with the new run, until that has a checkpoint
MOVING = ".moving"  # subfolder with the new run after the old run was removed, until all of it is moved
CHECKPOINTS = "checkpoints"
OF_RUN = (
    *("recipe.yaml", "environment.json", "classes.json", "basis.json", "metrics.jsonl", "summary.json", "curves.png"),
    *("alignment.json", "test_classes.json", "loggers.json", "threshold.json", "threshold-local.json"),
    *(CHECKPOINTS, "features", "tensorboard"),
    *("embeddings", "vectors", "evaluations", "exports", "plots"),  # computed with its weights
)
"""Files and folders of a run; others in its folder are not."""


def take_over(folder: Path) -> None:
    """Replace the old run by a new one that has a checkpoint; continue a replacement that was interrupted."""
    new, moving = folder / NEW, folder / MOVING
    if not moving.exists():
        if not (new / CHECKPOINTS / "last.pt").exists():
            return
        for path in map(folder.joinpath, OF_RUN):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        new.rename(moving)
    # the checkpoints are moved last: until then the run cannot be mistaken for a complete one
    for path in sorted(moving.iterdir(), key=lambda path: path.name == CHECKPOINTS):
        path.replace(folder / path.name)
    moving.rmdir()
