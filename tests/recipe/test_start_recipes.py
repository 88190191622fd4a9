"""The recipes to start from: read without network and without photos, with what the weights were published with."""

import socket

import pytest
import timm

from dmlkit.recipe.file import read_recipe
from tests.conftest import ROOT

RECIPES = sorted((ROOT / "recipes" / "start").glob("[!_]*.yaml"))
PUBLISHED = {"dinov2_s": (224, 224), "dinov3_s": (256, 256), "siglip_b": (224, 248), "convnext_t": (224, 256)}
PUBLISHED |= {"megadescriptor_t": (224, 224), "dinov2_b": (224, 224), "siglip2_b": (224, 248), "pe_core_b": (224, 224)}
PUBLISHED |= {"tipsv2_b": (224, 224), "eva02_l": (448, 448)}
PUBLISHED |= {f"{how}_lite0": (224, 256) for how in ("frozen", "head_views", "full")}


def test_every_network_is_there_once_but_lite0_which_needs_no_download():
    assert {path.stem for path in RECIPES} == {*PUBLISHED}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_they_read_without_network_and_without_photos(path, monkeypatch: pytest.MonkeyPatch, tmp_path):
    def refuse(*_, **__):
        raise OSError("a test reached for the network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.chdir(tmp_path)
    recipe = read_recipe(path, ["dataset.root=elsewhere"])
    assert (recipe.transform.size, recipe.transform.resizing.side) == PUBLISHED[path.stem]
    assert timm.is_model(recipe.backbone.architecture or recipe.backbone.model)
    assert recipe.backbone.tuning.name == ("none" if path.stem.startswith(("frozen", "head_views")) else "full")
    assert recipe.dataset.root == "elsewhere"


def test_check_ends_with_the_license_of_the_weights(dmlkit):
    assert dmlkit("check", "start/eva02_l").out.endswith("# pretrained weights: license mit\n")
    unfree = dmlkit("check", "start/megadescriptor_t").out.splitlines()[-1]
    assert unfree == "# pretrained weights: license unknown"  # without network: it is in the config.json of the Hub
    assert "license" not in dmlkit("check", "glyphs/proxy_anchor").out
