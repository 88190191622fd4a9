"""`dmlkit gallery migrate`: the gallery then equals one that the new run creates, and the old one can be restored."""

import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dmlkit.errors import UserError
from dmlkit.gallery.change import GallerySettings, add_images, create_gallery, remove_images, restore_version
from dmlkit.gallery.folder import GalleryFolder
from dmlkit.gallery.migrate import migrate_gallery
from dmlkit.vectors import fill, store
from dmlkit.vectors.fill import PartEmbedder
from dmlkit.vectors.progress_bar import Advance
from tests.conftest import ONE_EPOCH, Cli
from tests.datasets import trees
from tests.gallery.test_faults import ended, killed_after_two_parts, migrate
from tests.gallery.test_gallery import rows_of
from tests.processes import Forked
from tests.vectors.stored import ON_CPU


@pytest.fixture(scope="module")
def flat(tmp_path_factory: pytest.TempPathFactory, trained_once: Callable[..., Path]) -> Path:
    """A run of another width and geometry."""
    return trained_once(tmp_path_factory.mktemp("flat"), ONE_EPOCH)


def kept_of(path: Path) -> list[tuple[Any, ...]]:
    """What a model does not change of a gallery's rows, in their order."""
    gallery = GalleryFolder(path)
    pictures = [item.thumbnail for item in gallery.items_at(torch.arange(len(gallery)))]
    kept = gallery.table.drop_columns(["part", "row"]).to_pylist()
    return [(tuple(row.values()), picture) for row, picture in zip(kept, pictures, strict=True)]


def test_a_migrated_gallery_equals_a_new_one_and_the_old_comes_back(place, flat, tmp_path, dmlkit):
    shutil.copytree(place / "photos", tmp_path / "photos")
    columns = "path,label,latitude,longitude,time,x1,y1,x2,y2"
    cells = ["crow/0.jpg,crow,1,2,2020-01-01,0,0,20.5,20", "crow/0.jpg,rook,1,2,,5,5,30,30", "dove/1.jpg,dove,,,,,,,"]
    table = tmp_path / "birds.csv"
    table.write_text("\n".join([columns, *(f"photos/{line}" for line in cells)]))
    gallery, fresh = tmp_path / "gallery", tmp_path / "fresh"
    create_gallery(place / "run", table, gallery, settings=GallerySettings(True, -0.5), model=ON_CPU)
    create_gallery(flat, table, fresh, settings=GallerySettings(thumbnails=True), model=ON_CPU)
    before, kept, reader = rows_of(gallery), kept_of(gallery), GalleryFolder(gallery)
    points = torch.cat(list(reader.blocks(2)))
    dmlkit("gallery", "add", gallery, place / "photos", "--run", place / "other").refused(
        "another model (fingerprint", "dmlkit gallery migrate"
    )

    result = dmlkit("gallery", "migrate", gallery, flat, "--device", "cpu").ok()
    assert f"3 images of {gallery} embedded with {flat}: version 2" in result.out
    assert f"dmlkit gallery restore {gallery} 1" in result.out and f"dmlkit calibrate {gallery}" in result.out
    assert rows_of(gallery) == rows_of(fresh) and kept_of(gallery) == kept
    assert len(reader) == 3 and torch.equal(torch.cat(list(reader.blocks(2))), points)
    found = GalleryFolder(gallery).manifest
    assert (found.threshold, found.dim, found.manifold.name, found.run) == (None, 8, "sphere", str(flat))
    assert dmlkit("gallery", "info", gallery, "--verify").code == 0
    again = dmlkit("gallery", "migrate", gallery, flat, "--device", "cpu")
    assert again.code == 0 and "has the embeddings of" in again.out and GalleryFolder(gallery).version == 2
    history = dmlkit("gallery", "history", gallery, "--json").json()
    assert [one["run"] for one in history] == [str((place / "run").resolve()), str(flat)]

    add_images(gallery, place / "photos" / "gull", label="gull", model=ON_CPU)  # by the new run
    add_images(fresh, place / "photos" / "gull", label="gull", model=ON_CPU)
    assert rows_of(gallery) == rows_of(fresh)
    result = dmlkit("gallery", "restore", gallery, 1)
    assert f"restored version 1 of {gallery}: 3 images, embedded with {place / 'run'}" in result.out
    assert rows_of(gallery) == before and GalleryFolder(gallery).manifest.threshold == -0.5
    add_images(gallery, place / "photos" / "gull", label="gull", model=ON_CPU)  # by the old one again
    restore_version(gallery, 3)
    assert rows_of(gallery) == rows_of(fresh)


def test_images_that_are_gone_are_named_and_found_where_they_are_now(place: Path, tmp_path: Path, dmlkit: Cli):
    gallery, photos, moved = tmp_path / "gallery", tmp_path / "photos", tmp_path / "archive" / "photos"
    shutil.copytree(place / "photos", photos)
    create_gallery(place / "run", photos, gallery, model=ON_CPU)
    before = rows_of(gallery)
    shutil.move(photos, moved)
    result = dmlkit("gallery", "migrate", gallery, place / "other", "--device", "cpu")
    result.refused("12 of 12 images are missing or have changed", str(photos / "crow" / "0.jpg"), "and 7 more")
    trees.photo(moved / "dove" / "1.jpg", 77)
    result = dmlkit("gallery", "migrate", gallery, place / "other", moved.parent, "--device", "cpu")
    result.refused(f"1 of 12 images are missing or have changed: {photos / 'dove' / '1.jpg'}; nothing was changed")
    assert rows_of(gallery) == before and GalleryFolder(gallery).version == 1
    remove_images(gallery, images=[str(photos / "dove" / "1.jpg")])
    assert migrate_gallery(gallery, place / "other", moved, model=ON_CPU).images == 11
    create_gallery(place / "other", moved, tmp_path / "fresh", model=ON_CPU)
    remove_images(tmp_path / "fresh", images=[str(moved / "dove" / "1.jpg")])
    assert rows_of(gallery) == rows_of(tmp_path / "fresh")


@pytest.mark.slow
def test_a_kill_changes_nothing_and_costs_one_part_also_of_a_gallery_that_grew(place, tmp_path, computed, monkeypatch):
    gallery, fresh = tmp_path / "gallery", tmp_path / "fresh"
    create_gallery(place / "run", place / "photos", gallery, model=ON_CPU)
    before = rows_of(gallery)
    assert ended(Forked(killed_after_two_parts, migrate, place, gallery)) == -signal.SIGKILL
    assert rows_of(gallery) == before
    new = trees.photo(tmp_path / "new.jpg", 99)
    add_images(gallery, new, label="wren", model=ON_CPU)
    remove_images(gallery, images=[str(place / "photos" / "crow" / "1.jpg")])
    for module in (store, fill):
        monkeypatch.setattr(module, "BATCH_IMAGES", 4)
    computed.clear()
    migrated = migrate_gallery(gallery, place / "other", model=ON_CPU)
    assert sum(computed) == 5 and migrated.resumed == 7
    create_gallery(place / "other", place / "photos", fresh, model=ON_CPU)
    add_images(fresh, new, label="wren", model=ON_CPU)
    remove_images(fresh, images=[str(place / "photos" / "crow" / "1.jpg")])
    ours, theirs = rows_of(gallery), rows_of(fresh)
    assert {name: row[:2] for name, row in ours.items()} == {name: row[:2] for name, row in theirs.items()}
    for name, row in ours.items():  # other batches: equal but for rounding
        assert row[2] == pytest.approx(theirs[name][2], abs=1e-6)


def test_images_that_are_added_meanwhile_get_the_new_model(place, tmp_path, monkeypatch):
    gallery, photos = tmp_path / "gallery", place / "photos"
    create_gallery(place / "run", photos / "crow", gallery, label="crow", model=ON_CPU)
    embed = PartEmbedder.__call__

    def meanwhile(work: Callable[[], object]) -> None:
        """Do some work while the next images are embedded."""

        def both(self: PartEmbedder, numbers: list[int], advance: Advance) -> None:
            monkeypatch.setattr(PartEmbedder, "__call__", embed)
            work()
            embed(self, numbers, advance)

        monkeypatch.setattr(PartEmbedder, "__call__", both)

    meanwhile(lambda: add_images(gallery, photos / "dove", label="dove", model=ON_CPU))
    assert migrate_gallery(gallery, place / "other", model=ON_CPU).images == 6
    create_gallery(place / "other", photos / "crow", tmp_path / "fresh", label="crow", model=ON_CPU)
    add_images(tmp_path / "fresh", photos / "dove", label="dove", model=ON_CPU)
    assert rows_of(gallery) == rows_of(tmp_path / "fresh")
    meanwhile(lambda: migrate_gallery(gallery, place / "run", model=ON_CPU))
    with pytest.raises(UserError, match="was migrated to another model in the meantime; rerun the same command"):
        add_images(gallery, photos / "gull", model=ON_CPU)
    assert len(GalleryFolder(gallery)) == 6
    assert add_images(gallery, photos / "gull", model=ON_CPU).added == 3
