"""Why two images are similar, as a page shows it."""

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dmlkit.datasets.files.samples import ImageSamples
from dmlkit.embedding.embedder import GivenImages
from dmlkit.embedding.questions.why import explain_images
from dmlkit.embedding.serve.service import Pixels, Service
from dmlkit.errors import UserError
from dmlkit.run_folder.folder import RunFolder

LINES = 8  # more of them hide the images
SIDE = 320  # pixels of a picture


def explained(service: Service, images: Sequence[Pixels | Path]) -> dict[str, Any]:
    """Return the pictures of two images as the model sees them, what their patches contribute, and the best pairs.

    Returns:
        ``similarity`` and ``score``; ``grid``, rows and columns of patches; ``images``, two JPEGs in base64; ``heat``,
        per image what each patch contributes, row by row; ``pairs``, each with the positions ``a`` and ``b`` of two
        patches and their ``contribution``, the largest first.

    Raises:
        UserError: the features of the model have no parts, or a file cannot be read.
    """
    trained = service.embedder.trained
    if trained.fusion is not None:
        raise UserError("two models embed these images; an explanation needs one: create the gallery with one model")
    with torch.inference_mode(False), torch.enable_grad():
        seen = explain_images(trained, GivenImages(images), None if service.run is None else RunFolder(service.run))
    found = seen.explanation
    values, columns = torch.tensor(found.contributions, dtype=torch.float64), found.grid[1]
    return {
        "similarity": found.similarity,
        "score": found.score,
        "grid": list(found.grid),
        "images": [base64.b64encode(ImageSamples().picture(one, SIDE)).decode() for one in seen.images],
        "heat": [values.sum(1).tolist(), values.sum(0).tolist()],
        "pairs": [
            {
                "a": pair.a.row * columns + pair.a.column,
                "b": pair.b.row * columns + pair.b.column,
                "contribution": pair.contribution,
            }
            for pair in found.strongest(LINES)
        ],
    }
