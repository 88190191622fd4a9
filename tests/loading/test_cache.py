"""The cache: the same pixels as decoding, and a refusal whenever they might not be."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from dmlkit.errors import UserError
from dmlkit.loading.cache import CachedImages, images_of_split, images_to_cache, write_cache
from dmlkit.loading.inputs import TransformedImages
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
    with pytest.raises(UserError, match=f"does not contain the image .*{new.name}"):
        images_of_split(recipe.dataset, "train")
    (tmp_path / "cache" / "pixels.bin").write_bytes(b"short")
    with pytest.raises(UserError, match=r"has 5 bytes, expected \d+"):
        images_of_split(recipe.dataset, "train")
    (tmp_path / "cache" / "manifest.json").unlink()
    with pytest.raises(UserError, match="no such file; create the cache with dmlkit data cache"):
        images_of_split(recipe.dataset, "train")


def test_the_manifest_says_what_is_there_and_other_formats_are_told(tmp_path: Path):
    root = trees.cub(tmp_path / "cub")
    recipe, file = cached(recipe_of(root, "plain"), tmp_path / "cache"), tmp_path / "cache" / "manifest.json"
    dataset = {"name": "cub200", "split": "official", "fold": 0, "validation_fraction": 0.0, "on_bad_image": "error"}
    dataset |= {"levels": [], "max_pixels": 80_000_000}
    written = {
        "format": 1,
        "dmlkit": "0.1.0",
        "resizing": "16 x 16 pixels, bilinear",
        "dataset": {**dataset, "cache": None, "root": str(root)},
        "images": 12,
        "index": hashlib.sha256((tmp_path / "cache" / "index.parquet").read_bytes()).hexdigest(),
        "bytes": 12 * 3 * 16 * 16,
        "skipped": [],
    }
    assert json.loads(file.read_text()) == written
    again = f"dataset.cache: {file}: .*{{}}.*run dmlkit data cache again$"
    for changes, told in (
        ({"format": 2}, "format 2, written by dmlkit 0.1.0; .* which reads format 1"),
        ({"format": 3}, "format 3"),
        ({"colour": 1}, "colour: extra inputs are not permitted"),
        ({"images": "12"}, "images: input should be a valid integer"),
    ):
        file.write_text(json.dumps({**written, **changes}))
        with pytest.raises(UserError, match=again.format(told)):
            images_of_split(recipe.dataset, "train")
    without_resizing = {key: value for key, value in written.items() if key != "resizing"}
    for content in ("", "[]", json.dumps({"format": 1}), json.dumps(without_resizing)):
        file.write_text(content)
        with pytest.raises(UserError, match=again.format("")):
            images_of_split(recipe.dataset, "train")


def with_index(folder: Path, table: pa.Table) -> None:
    """Another index, which the manifest knows of."""
    parquet.write_table(table, folder / "index.parquet")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["index"] = hashlib.sha256((folder / "index.parquet").read_bytes()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))


def replaced(table: pa.Table, name: str, values: list[object], kind: str = "int64") -> pa.Table:
    column = pa.array(values + table[name].to_pylist()[len(values) :], kind)
    return table.set_column(table.column_names.index(name), name, column)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda table: table.slice(1), "has 11 images, expected 12"),
        (lambda table: table.drop_columns(["key"]), r"expected \{'key': 'string'"),
        (lambda table: table.drop_columns(["bytes"]), r"expected \{'key': 'string'"),
        (lambda table: replaced(table, "height", [None]), "without blank cells"),
        (lambda table: replaced(table, "key", [None], "string"), "without blank cells"),
        (lambda table: replaced(table, "width", [16.5], "double"), "'width': 'double'"),
        (lambda table: replaced(replaced(table, "height", [-16]), "width", [-16]), "with 9216 bytes in total"),
        (lambda table: replaced(replaced(table, "height", [2**62]), "width", [2**62]), "with 9216 bytes in total"),
        (lambda table: replaced(table, "height", [17]), "with 9216 bytes in total"),
    ],
)
def test_an_index_that_is_none_is_told(change: Callable[[pa.Table], pa.Table], told: str, tmp_path: Path):
    recipe = cached(recipe_of(trees.cub(tmp_path / "cub"), "plain"), tmp_path / "cache")
    index = tmp_path / "cache" / "index.parquet"
    with_index(tmp_path / "cache", change(parquet.read_table(index)))
    with pytest.raises(UserError, match=f"^dataset.cache: {index}.*{told}.*run dmlkit data cache again$"):
        images_of_split(recipe.dataset, "train")


def test_an_index_of_another_cache_is_told(tmp_path: Path):
    recipe = cached(recipe_of(trees.cub(tmp_path / "cub"), "plain"), tmp_path / "cache")
    index = tmp_path / "cache" / "index.parquet"
    table = parquet.read_table(index)
    for content in (lambda: parquet.write_table(table.slice(1), index), lambda: index.write_bytes(b"")):
        content()
        with pytest.raises(
            UserError, match=f"{index} is damaged, or belongs to another cache than .*run dmlkit data cache again"
        ):
            images_of_split(recipe.dataset, "train")
    for name in ("index.parquet", "pixels.bin"):
        (tmp_path / "cache" / name).unlink()
        with pytest.raises(UserError, match=f"{name}: no such file; create the cache with dmlkit data cache"):
            images_of_split(recipe.dataset, "train")
        (tmp_path / "cache" / name).write_bytes(b"")


def test_damaged_pixels_are_told_w10(tmp_path: Path):
    recipe = cached(recipe_of(trees.cub(tmp_path / "cub"), "plain"), tmp_path / "cache")
    pixels = tmp_path / "cache" / "pixels.bin"
    content = bytearray(pixels.read_bytes())
    content[1000:6000] = bytes(255 - byte for byte in content[1000:6000])
    pixels.write_bytes(content)
    images = TransformedImages(images_of_split(recipe.dataset, "all"), recipe.transform, training=False)
    faults = [images[index, 0].fault for index in range(12)]
    assert [index for index in range(12) if faults[index]] == list(range(1000 // 768, 5999 // 768 + 1))
    path = images.dataset.paths[1]
    assert faults[1] == f"dataset.cache: {pixels}: {path} is damaged; run dmlkit data cache again"


PARTS = ("manifest.json", "index.parquet", "pixels.bin")


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("content", [None, "[]", '{"format": 1, "dim": 16, "count": 3}', "\0"])
@pytest.mark.parametrize("name", PARTS)
def test_files_of_others_are_refused_d5(name: str, content: str | None, overwrite: bool, tmp_path: Path):
    """Embeddings have a manifest.json too, and a user may have a pixels.bin."""
    recipe, output = recipe_of(trees.cub(tmp_path / "cub"), "plain"), tmp_path / "emb"
    output.mkdir()
    (output / name).write_text("theirs")
    if content is not None:
        (output / "manifest.json").write_text(content)
    before = {path.name: path.read_bytes() for path in output.iterdir()}
    with pytest.raises(UserError, match="is not part of a cache that dmlkit wrote; use another --output"):
        write_cache(recipe, images_to_cache(recipe), output, overwrite=overwrite, advance=lambda _: None)
    assert {path.name: path.read_bytes() for path in output.iterdir()} == before


def test_the_old_cache_stays_until_the_new_one_is_whole_d5(tmp_path: Path):
    root = trees.cub(tmp_path / "cub")
    recipe, output = cached(recipe_of(root, "plain"), tmp_path / "cache"), tmp_path / "cache"
    before = {name: (output / name).read_bytes() for name in PARTS}
    other = recipe_of(root, "imagenet")

    def stop(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_cache(other, images_to_cache(other), output, overwrite=True, advance=stop)
    broken = Path(images_of_split(recipe.dataset, "all").paths[5])
    good, status = broken.read_bytes(), broken.stat()
    broken.write_bytes(b"")
    with pytest.raises(UserError, match="the file is empty"):
        write_cache(other, images_to_cache(other), output, overwrite=True, advance=lambda _: None)
    assert {path.name: path.read_bytes() for path in output.iterdir()} == before
    broken.write_bytes(good)
    os.utime(broken, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert len(images_of_split(recipe.dataset, "all")) == 12


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("renamed", [0, 1, 2])
def test_killed_while_files_are_renamed_the_same_command_goes_on_d5(renamed: int, overwrite: bool, tmp_path: Path):
    root, output = trees.cub(tmp_path / "cub"), tmp_path / "cache"
    recipe = recipe_of(root, "plain")
    if overwrite:
        cached(recipe_of(root, "imagenet"), output)
    replace, left = Path.replace, [renamed]

    def killed(path: Path, target: Path) -> Path:
        if target.parent == output and target.name in PARTS:
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
        return replace(path, target)

    def write() -> None:
        write_cache(recipe, images_to_cache(recipe), output, overwrite=overwrite, advance=lambda _: None)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "replace", killed)
        write()
    config = recipe.dataset.model_copy(update={"cache": str(output)})
    if renamed or not overwrite:  # else the old cache is still there, whole
        with pytest.raises(UserError, match=r"run dmlkit data cache again|create the cache with dmlkit data cache"):
            images_of_split(config, "all")
    else:
        assert images_of_split(config, "all").resizing == "a shorter side of 20 pixels, bilinear"
    write()
    assert images_of_split(config, "all").resizing == "16 x 16 pixels, bilinear"


@pytest.mark.usefixtures("images_have_readers")
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
        images.sample(2)
    assert images.sample(3).shape == (3, 16, 16)


@pytest.mark.usefixtures("images_have_readers")
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
    assert result.code == 2 and "already in memory" in result.err
