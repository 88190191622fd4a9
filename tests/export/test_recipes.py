"""Every model of the glyphs' recipes in every format: the file, read again, gives the embeddings of the model."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.parametrize import is_parametrized

from dmlkit.export.hub import export_hub
from dmlkit.export.model import ModelFormat, export_model
from dmlkit.manifolds.hyperbolic import Hyperbolic
from dmlkit.model import build_model
from dmlkit.recipe.file import read_recipe
from dmlkit.run_folder.folder import RunFolder
from dmlkit.vectors.embedder import load
from dmlkit.vectors.trained import TrainedModel
from tests.conftest import ROOT

RECIPES = sorted((ROOT / "recipes" / "glyphs").glob("*.yaml"))
IMAGES = torch.randint(0, 256, (5, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@cache
def models() -> dict[str, TrainedModel]:
    """Return the models of all recipes, each once: 29 recipes have the same one."""
    found: dict[str, tuple[str, TrainedModel]] = {}
    for path in RECIPES:
        recipe = read_recipe(path, ["dataset.classes=8", "dataset.images_per_class=4", "backbone.width=4"])
        key = recipe.model_dump_json(include={"transform", "backbone", "head", "embedding_dim", "manifold"})
        if key not in found:
            torch.manual_seed(0)
            model = build_model(recipe).eval()
            for part in model.modules():
                if isinstance(part, Hyperbolic) and is_parametrized(part.geometry):
                    part.geometry.k = 1.3 * part.geometry.k
            found[key] = path.stem, TrainedModel.of(recipe, model)
    return dict(found.values())


def read_again(format: ModelFormat, path: Path, trained: TrainedModel) -> np.ndarray[Any, Any]:  # noqa: A002
    rows = IMAGES.permute(0, 2, 3, 1).contiguous()
    match format:
        case "onnx":
            onnxruntime: Any = pytest.importorskip("onnxruntime")
            return onnxruntime.InferenceSession(path).run(None, {"images": rows.numpy()})[0]
        case "torch-export":
            return torch.export.load(path).module()(rows).numpy()
        case "safetensors":
            from safetensors.torch import load_file

            fresh = build_model(trained.recipe).eval()
            fresh.load_state_dict(load_file(path))
            return fresh(IMAGES).numpy()
        case "hub":
            return load(path, device="cpu").embed([*rows.numpy()])


@pytest.mark.slow
@pytest.mark.parametrize("format", ["safetensors", "hub", "torch-export", "onnx"])
@torch.no_grad()
def test_a_file_gives_the_embeddings_of_the_model(format: ModelFormat, tmp_path: Path):  # noqa: A002
    assert len(models()) >= 7
    for number, (recipe, trained) in enumerate(models().items()):
        path = tmp_path / f"{number}.pt2"
        if format == "hub":
            export_hub(RunFolder(tmp_path / "run"), trained, path)
        else:
            export_model(trained, format, path, takes="images" if format != "safetensors" else "squares")
        found = read_again(format, path, trained)
        np.testing.assert_allclose(found, trained.model(IMAGES).numpy(), atol=1e-5, rtol=1e-4, err_msg=recipe)
