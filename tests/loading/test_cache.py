"""The cache: the same pixels as decoding, and a refusal whenever they might not be."""

import json
import os
from pathlib import Path

import pytest
import torch
from pyarrow import parquet

from dmlkit.errors import UserError
from dmlkit.loading.batches import TransformedImages
from dmlkit.loading.cache import CachedImages, CacheManifest, images_of_split
from dmlkit.loading.cache_writer import images_to_cache, write_cache
from dmlkit.recipe.schema import Recipe
from dmlkit.transforms.base import TransformConfig
from tests.datasets import trees


def recipe_of(root: Path, transform: str, **dataset: object) -> Recipe:
    config = TransformConfig.variants[transform]
    sizes = {"size": 16} if transform == "plain" else {"size": 16, "resize": 20}
    return Recipe.model_validate(
        {
            "dataset": {"name": "cub200", "root": str(root), "validation_fraction": 0.0, **dataset},
            "transform": config(**sizes),
            "loss": {"name": "proxy_anchor"},
        }
    )


def cached(recipe: Recipe, folder: Path) -> Recipe:
    write_cache(recipe, images_to_cache(recipe), folder, overwrite=True, advance=lambda _: None)
    return recipe.model_copy(update={"dataset": recipe.dataset.model_copy(update={"cache": str(folder)})})


@pytest.mark.parametrize("transform", sorted(TransformConfig.variants))
def test_evaluation_from_a_cache_is_exact(transform: str, tmp_path: Path):
    recipe = recipe_of(trees.cub(tmp_path / "cub"), transform)
    from_cache = cached(recipe, tmp_path / "cache")
    for split in ("train", "test"):
        decoded = TransformedImages(images_of_split(recipe.dataset, split), recipe.transform, training=False)
        stored = TransformedImages(images_of_split(from_cache.dataset, split), recipe.transform, training=False)
        assert isinstance(stored.dataset, CachedImages)
        for index in range(len(decoded.dataset)):
            first, second = decoded[index, 0], stored[index, 0]
            assert torch.equal(first[0], second[0]) and first[1:] == second[1:]


def test_a_cache_of_another_transform_is_refused(tmp_path: Path):
    recipe = cached(recipe_of(trees.cub(tmp_path / "cub"), "imagenet"), tmp_path / "cache")
    other = TransformConfig.variants["imagenet"](size=16, resize=24)
    with pytest.raises(UserError, match=r"shorter side of 20 pixels, bilinear, but .* 24 pixels"):
        TransformedImages(images_of_split(recipe.dataset, "train"), other, training=True)


def test_changed_added_and_missing_files_are_told(tmp_path: Path):
    root = trees.cub(tmp_path / "cub")
    recipe = cached(recipe_of(root, "plain"), tmp_path / "cache")
    changed = Path(images_of_split(recipe.dataset, "test").paths[0])
    status = changed.stat()
    trees.photo(changed, 99)
    os.utime(changed, ns=(status.st_atime_ns, status.st_mtime_ns + 1_000_000))
    with pytest.raises(UserError, match=f"{changed.name} has changed since"):
        images_of_split(recipe.dataset, "test")
    recipe = cached(recipe_of(trees.cub_images_only(tmp_path / "more"), "plain"), tmp_path / "cache")
    new = trees.photo(tmp_path / "more" / "CUB_200_2011" / "images" / trees.CUB[1] / "new.jpg", 5)
    with pytest.raises(UserError, match=f"has no image .*{new.name}"):
        images_of_split(recipe.dataset, "train")
    (tmp_path / "cache" / "pixels.bin").write_bytes(b"short")
    with pytest.raises(UserError, match=r"has 5 bytes, expected \d+"):
        images_of_split(recipe.dataset, "train")
    (tmp_path / "cache" / "manifest.json").unlink()
    with pytest.raises(UserError, match="missing; write it with dmlkit data cache"):
        images_of_split(recipe.dataset, "train")


def test_what_was_written_before_is_read_and_other_formats_are_told(tmp_path: Path):
    root = trees.cub(tmp_path / "cub")
    recipe, file = cached(recipe_of(root, "plain"), tmp_path / "cache"), tmp_path / "cache" / "manifest.json"
    dataset = {"name": "cub200", "split": "official", "fold": 0, "validation_fraction": 0.0, "on_bad_image": "error"}
    written = {  # of dmlkit 0.1.0
        "format": 1,
        "dmlkit": "0.1.0",
        "resizing": "16 x 16 pixels, bilinear",
        "dataset": {**dataset, "cache": None, "root": str(root)},
        "images": 12,
        "bytes": 12 * 3 * 16 * 16,
        "skipped": [],
    }
    assert json.loads(file.read_text()) == written
    file.write_text(json.dumps(written))
    assert images_of_split(recipe.dataset, "train").resizing == "16 x 16 pixels, bilinear"
    assert CacheManifest.read(file).images == 12
    again = f"dataset.cache: {file}: .*{{}}.*run dmlkit data cache again$"
    for changes, told in (
        ({"format": 2}, "format 2"),
        ({"colour": 1}, "colour: extra inputs are not permitted"),
        ({"images": "12"}, "images: input should be a valid integer"),
    ):
        file.write_text(json.dumps({**written, **changes}))
        with pytest.raises(UserError, match=again.format(told)):
            images_of_split(recipe.dataset, "train")
    for content in ("", "[]", json.dumps({"format": 1})):
        file.write_text(content)
        with pytest.raises(UserError, match=again.format("")):
            images_of_split(recipe.dataset, "train")


def test_an_index_of_another_cache_is_told(tmp_path: Path):
    recipe = cached(recipe_of(trees.cub(tmp_path / "cub"), "plain"), tmp_path / "cache")
    index = tmp_path / "cache" / "index.parquet"
    table = parquet.read_table(index)
    for other, told in ((table.slice(1), "has 11 rows"), (table.drop_columns(["key"]), r"expected 12 of \['key'")):
        parquet.write_table(other, index)
        with pytest.raises(UserError, match=f"{index}: .*{told}.*run dmlkit data cache again"):
            images_of_split(recipe.dataset, "train")
    index.write_bytes(b"")
    with pytest.raises(UserError, match=f"{index}: cannot read this index.*run dmlkit data cache again"):
        images_of_split(recipe.dataset, "train")
    for name in ("index.parquet", "pixels.bin"):
        (tmp_path / "cache" / name).unlink()
        with pytest.raises(UserError, match=f"{name}: missing; write it with dmlkit data cache"):
            images_of_split(recipe.dataset, "train")
        (tmp_path / "cache" / name).write_bytes(b"")


def test_unreadable_images_stop_or_are_skipped(tmp_path: Path):
    root = trees.cub(tmp_path / "cub")
    recipe = recipe_of(root, "plain")
    broken = Path(images_of_split(recipe.dataset, "train").paths[2])
    broken.write_bytes(b"")
    with pytest.raises(UserError, match="the file is empty"):
        cached(recipe, tmp_path / "cache")
    assert not (tmp_path / "cache" / "manifest.json").exists()
    images = images_of_split(cached(recipe_of(root, "plain", on_bad_image="skip"), tmp_path / "cache").dataset, "train")
    with pytest.raises(UserError, match="could not be read when the cache was written"):
        images.image(2)
    assert images.image(3).shape == (3, 16, 16)


def test_command(dmlkit, tiny_recipe: Path, tmp_path: Path):
    root = trees.cub(tmp_path / "cub")
    options = ["--set", f"dataset={{name: cub200, root: '{root}', validation_fraction: 0}}"]
    options += ["--set", "sampler.batch_size=4", "--set", "training.epochs=1", "--set", "training.select_by=recall@1"]
    result = dmlkit("data", "cache", tiny_recipe, "-o", tmp_path / "cache", *options)
    assert result.code == 0 and "12 images" in result.out and "dataset.cache" in result.out
    result = dmlkit("data", "cache", tiny_recipe, "-o", tmp_path / "cache", *options)
    assert result.code == 2 and "already holds a cache" in result.err
    losses = []
    for name, more in (("plain", []), ("cached", ["--set", f"dataset.cache={tmp_path / 'cache'}"])):
        run = tmp_path / name
        result = dmlkit("train", tiny_recipe, "-o", run, *options, *more)
        assert result.code == 0, result.err
        losses.append((run / "metrics.jsonl").read_text().split('"lr"')[0])
    assert losses[0] == losses[1]
    result = dmlkit("data", "cache", tiny_recipe, "-o", tmp_path / "glyphs")
    assert result.code == 2 and "in memory already" in result.err
