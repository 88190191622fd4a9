"""A folder of embeddings made by hand, and the modules that commands import."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from dmlkit.datasets.base import Split
from dmlkit.distributed.launch import start_ranks
from dmlkit.gallery.sources import split_points
from dmlkit.run_folder.folder import RunFolder
from dmlkit.vectors.fusion import ModelChoice
from dmlkit.vectors.points import PointsInMemory
from dmlkit.vectors.trained import load_model

ON_CPU = ModelChoice(device="cpu")

MANIFEST = """\
{
  "format": 1,
  "dmlkit": "0.1.0",
  "dim": 8,
  "features": 8,
  "dtype": "float32",
  "manifold": {"name": "sphere", "proxies": "features", "similarity": "cosine", "metric": "chord"},
  "similarity": "cosine",
  "index": {
    "order": "the largest inner products of the vectors of a query and of the gallery are the most similar",
    "form": "as_is",
    "curvature": null
  },
  "model": {
    "fingerprint": "cd4f8512b630f73db9a23f6316c4affea17971c912a298e81f7a75c33a40bc7c",
    "checkpoint": "best",
    "epoch": 1,
    "backbone": {"name": "small_cnn", "freeze_batchnorm_statistics": false, "freeze_batchnorm_affine": false,
                 "freeze_epochs": 0, "width": 4}
  },
  "preprocessing": {
    "input": "RGB pixels 0..255, upright", "name": "hyp_vit", "size": 16, "mean": [0.5, 0.5, 0.5],
    "std": [0.5, 0.5, 0.5], "channels": "rgb", "pixel_max": 1, "augment": [], "resize": 20, "min_scale": 0.2,
    "flip": true
  },
  "source": "photos",
  "count": 5,
  "skipped": ["photos/broken.jpg: cannot read this image"]
}
"""
INDEX: dict[str, Any] = json.loads(MANIFEST)["index"]
"""The search index as manifests have it."""
POINTS = np.eye(5, 8, dtype=np.float32)
POINCARE = {"name": "poincare", "proxies": "features", "curvature": -0.49700847268104553, "learnable_curvature": True}
POINCARE |= {"clip_distance": 2.3, "similarity": "negative_distance"}
EUCLIDEAN = {"name": "euclidean", "proxies": "features", "similarity": "negative_distance"}


def manifest(**changes: Any) -> dict[str, Any]:
    similarity = changes.get("manifold", {}).get("similarity", "cosine")
    found = {**json.loads(MANIFEST), "similarity": similarity, **changes}
    if "manifold" in changes and "index" not in changes:  # it follows from the manifold
        del found["index"]
    return found


def items(rows: int = 5) -> dict[str, list[Any]]:
    return {"id": list(range(rows)), "path": [f"photos/{row}.jpg" for row in range(rows)], "label": ["a"] * rows}


def embeddings_at(path: Path, points: np.ndarray = POINTS, **changes: Any) -> Path:
    path.mkdir()
    (path / "manifest.json").write_text(json.dumps(manifest(count=len(points), **changes)))
    np.save(path / "embeddings.npy", points)
    parquet.write_table(pa.table(items(len(points))), path / "items.parquet")
    return path


SESSION = """
import sys
from dmlkit.cli.app import main

unwanted, *commands = sys.argv[1:]
for words in commands:
    sys.argv = ["dmlkit", *words.split(), "--device", "cpu"]
    try:
        main()
    except SystemExit as end:
        assert not end.code, words
    found = [name for name in unwanted.split() if name in sys.modules]
    assert not found, f"{words} imports {found}"
"""


def check_imports(unwanted: str, *commands: str) -> None:
    """Run commands in a new process, and check that none of them imports one of these modules."""
    words = [sys.executable, "-c", SESSION, unwanted, *commands]
    ran = subprocess.run(words, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def split_of(run: Path, split: Split = "test") -> PointsInMemory:
    """The images of a split of a run, which are read from its store if they are there."""
    ranks = start_ranks("cpu")
    return split_points(RunFolder(run), load_model(RunFolder(run), ranks), ranks, split)
