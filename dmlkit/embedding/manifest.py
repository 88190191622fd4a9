"""What anyone needs to know who uses embeddings."""

from typing import Any

from dmlkit import __version__
from dmlkit.embedding.trained import TrainedModel


def describe(trained: TrainedModel) -> dict[str, Any]:
    """What anyone needs to use the embeddings of a model: its geometry, its fingerprint and its preprocessing."""
    recipe, manifold = trained.recipe, trained.model.manifold
    return {
        "dmlkit": __version__,
        "dim": manifold.point_dim,
        "features": manifold.dim,
        "dtype": "float32",
        "manifold": recipe.manifold.model_dump(mode="json") | manifold.learned_options(),
        "similarity": manifold.similarity_name,
        "index": {
            "order": "the largest inner products of the two vectors are the most similar; x is an embedding",
            **manifold.index_formula(),
        },
        "model": {
            "fingerprint": trained.model.fingerprint(),
            "checkpoint": trained.checkpoint,
            "epoch": trained.epoch,
            "backbone": recipe.backbone.model_dump(mode="json"),
        },
        "preprocessing": {
            "input": "RGB pixels 0..255, upright",
            **recipe.transform.model_dump(mode="json"),
        },
    }
