"""The recipes to start from: read without network and without photos, with what the weights were published with."""

import socket

import pytest
import timm

from dmlkit.recipe.file import read_recipe
from tests.conftest import ROOT

RECIPES = sorted((ROOT / "recipes" / "start").glob("[!_]*.yaml"))
PUBLISHED = {"lite0": (224, 256), "dinov2_s": (224, 224), "dinov3_s": (256, 256), "siglip_b": (224, 248)}
PUBLISHED |= {"convnext_t": (224, 256), "megadescriptor_t": (224, 224)}


def test_every_network_is_there_frozen_and_full():
    assert {path.stem for path in RECIPES} == {
        f"{how}_{network}" for how in ("frozen", "head_views", "lora", "full") for network in PUBLISHED
    }


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_they_read_without_network_and_without_photos(path, monkeypatch: pytest.MonkeyPatch, tmp_path):
    def refuse(*_, **__):
        raise OSError("a test reached for the network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.chdir(tmp_path)
    recipe = read_recipe(path, ["dataset.root=elsewhere"])
    how = next(how for how in ("frozen", "head_views", "lora", "full") if path.stem.startswith(how))
    network = path.stem.removeprefix(f"{how}_")
    assert (recipe.transform.size, recipe.transform.resizing.side) == PUBLISHED[network]
    assert timm.is_model(recipe.backbone.architecture or recipe.backbone.model)
    tuning = {"frozen": "none", "head_views": "none", "lora": "lora", "full": "full"}
    assert recipe.backbone.tuning.name == tuning[how]
    assert recipe.dataset.root == "elsewhere"
