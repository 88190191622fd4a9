"""The weights of a model as safetensors, with all that is needed to rebuild it."""

import json
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from dmlkit.embedding.manifest import describe
from dmlkit.embedding.trained import TrainedModel, merged_recipe, without_pretrained_weights
from dmlkit.model import EmbeddingModel, build_model


def write_safetensors(trained: TrainedModel, _: Tensor, path: Path) -> Callable[[Tensor], Tensor]:
    """Weights and, in the file's metadata, all that is needed to rebuild the model."""
    from safetensors.torch import load_file, save_file

    description = describe(trained)
    document = description.stamped()
    recipe = merged_recipe(trained.recipe)
    metadata = {"dmlkit": json.dumps(document), "recipe": recipe.model_dump_json()}
    tensors = {name: tensor.contiguous() for name, tensor in trained.model.state_dict().items()}
    save_file(tensors, path, metadata)
    again: EmbeddingModel = build_model(without_pretrained_weights(recipe), trained.model.num_features)
    again.load_state_dict(load_file(path))
    return again.eval()
