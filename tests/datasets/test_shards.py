"""Shards: the same images and runs as from the files that they were made of, and a line for what is none."""

import io
import json
import os
import re
import tarfile
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
import webdataset
from PIL import Image

from dmlkit.datasets import Cub200Config, FolderConfig, InShopConfig, ShardsConfig, SopConfig, TableConfig
from dmlkit.datasets import shards as indexing
from dmlkit.datasets.base import DatasetConfig
from dmlkit.datasets.files import tar as reading
from dmlkit.datasets.files.dataset import Dataset
from dmlkit.datasets.files.image import read_image
from dmlkit.errors import UserError
from dmlkit.files.image_file import BadImageError
from dmlkit.loading.batches import evaluation_loader
from dmlkit.loading.shard_writer import ShardWriter
from dmlkit.testing.data import check_dataset
from dmlkit.transforms.base import TransformConfig
from tests.conftest import END
from tests.datasets import trees
from tests.processes import WARM, Forked, held_command_line, wait_until

CLASSES = [f"class {letter}" for letter in "abcdefghijkl"]


def photos(root: Path, classes: list[str] = CLASSES, each: int = 4) -> Path:
    """A folder a class; names with dots, and one stem with two extensions."""
    for number, name in enumerate(classes):
        for index in range(each):
            trees.photo(root / name / f"{index // 2}.v2.{'jpg' if index % 2 else 'png'}", 10 * number + index)
    return root


def table(root: Path) -> Path:
    """Numbers for labels, groups, and two boxes of one image."""
    lines = ["path,label,split,group,x1,y1,x2,y2"]
    for index in range(12):
        trees.photo(root / f"{index}.jpg", index)
        split = "train" if index < 6 else "test"
        box = "1,2,20,15" if index % 2 else ",,,"
        lines.append(f"{index}.jpg,{(index // 3 + 8) % 11},{split},{'abc'[index % 3] if index % 4 else ''},{box}")
    lines.append("0.jpg,8,train,,2,2,9,9")
    (root / "table.csv").write_text("\n".join(lines) + "\n")
    return root / "table.csv"


def sharded(config: DatasetConfig, output: Path, images_per_shard: int = 5) -> ShardsConfig:
    ShardWriter(config, images_per_shard).write(output, lambda _: None)
    return ShardsConfig(root=str(output), validation_fraction=config.validation_fraction, split=config.split)


def assert_same(ours: Dataset, theirs: Dataset) -> None:
    assert ours.class_names == theirs.class_names and torch.equal(ours.labels, theirs.labels)
    for name in ("query", "gallery", "super_classes"):
        one, other = getattr(ours, name), getattr(theirs, name)
        assert (one is None) == (other is None) and (one is None or torch.equal(one, other)), name
    if theirs.groups is not None:
        assert ours.groups is not None
        assert torch.equal(ours.groups[:, None] == ours.groups, theirs.groups[:, None] == theirs.groups)
    assert all(torch.equal(ours.sample(index), theirs.sample(index)) for index in range(len(theirs)))


@pytest.mark.parametrize(
    "make",
    [
        lambda root: FolderConfig(root=str(photos(root)), validation_fraction=0.34),
        lambda root: FolderConfig(root=str(photos(root, [str(number) for number in range(16)])), split="reality_check"),
        lambda root: FolderConfig(root=str(trees.presplit(root)), validation_fraction=0),
        lambda root: TableConfig(file=str(table(root)), validation_fraction=0),
        lambda root: Cub200Config(root=str(trees.cub(root)), validation_fraction=0),
        lambda root: SopConfig(root=str(trees.sop(root)), validation_fraction=0.5),
        lambda root: InShopConfig(root=str(trees.inshop(root)), validation_fraction=0),
    ],
    ids=["folder", "reality check", "split folders", "table", "cub200", "sop", "inshop"],
)
def test_shards_hold_what_they_were_made_of(make: Callable[[Path], DatasetConfig], tmp_path: Path):
    (tmp_path / "source").mkdir()
    config = make(tmp_path / "source")
    shards = sharded(config, tmp_path / "shards")
    for split in ("train", "validation", "test") if config.validates else ("train", "test"):
        assert_same(shards.build(split), config.build(split))
    again = sharded(shards, tmp_path / "again", images_per_shard=2)  # shards of shards
    assert_same(again.build("test"), config.build("test"))


def test_the_contract_of_datasets_holds(tmp_path: Path):
    check_dataset(sharded(FolderConfig(root=str(photos(tmp_path / "photos"))), tmp_path / "shards"))


def test_a_run_from_shards_is_that_of_the_files_to_the_bit_also_resumed(dmlkit, tiny_recipe: Path, tmp_path: Path):
    photos(tmp_path / "photos")
    assert dmlkit("data", "shards", tmp_path / "photos", "-o", tmp_path / "shards", "--images-per-shard", 7).code == 0
    options = ["--device", "cpu", "--set", "training={epochs: 2, workers: 0}"]
    options += ["--set", "transform={name: imagenet, size: 16, resize: 20}"]
    options += ["--set", "sampler={name: class_balanced, classes_per_batch: 2, images_per_class: 3}"]

    def of(name: str) -> list[str]:
        dataset = f"dataset={{name: {name}, root: {tmp_path / ('photos' if name == 'folder' else name)}, "
        return [*options, "--set", f"{dataset}validation_fraction: 0.34}}"]

    assert dmlkit("train", tiny_recipe, "-o", tmp_path / "one", *of("folder")).code == 0
    words = ("train", tiny_recipe, "-o", tmp_path / "two", *of("shards"))
    (tmp_path / "marks").mkdir()
    killed = Forked(held_command_line, 4, str(tmp_path / "marks"), *map(str, words))
    wait_until(lambda: any((tmp_path / "marks").iterdir()), killed)
    killed.kill()
    killed.wait(END)
    assert dmlkit(*words, "--resume").code == 0
    one, two = (tmp_path / name / "checkpoints" / "last.pt" for name in ("one", "two"))
    one, two = (torch.load(path, weights_only=True) for path in (one, two))
    for part in ("model", "objective"):
        assert all(torch.equal(value, two[part][name]) for name, value in one[part].items())
    scores = [json.loads((tmp_path / name / "summary.json").read_text())["last"] for name in ("one", "two")]
    assert scores[0] == scores[1]


def test_webdataset_reads_what_was_written(tmp_path: Path):
    config = FolderConfig(root=str(photos(tmp_path / "photos")), validation_fraction=0)
    shards = sharded(config, tmp_path / "shards")
    for split in ("train", "test"):
        files = sorted(map(str, (tmp_path / "shards" / split).glob("*.tar")))
        samples = list(webdataset.WebDataset(files, shardshuffle=False, empty_check=False))
        ours = config.build(split)
        paths = [Path(ours.paths[index]) for index in range(len(ours))]
        assert [sample.get("jpg", sample.get("png")) for sample in samples] == [path.read_bytes() for path in paths]
        assert [json.loads(sample["json"])["label"] for sample in samples] == [path.parent.name for path in paths]
        names = shards.build(split).paths
        keys = [str(Path(names[index]).relative_to(tmp_path)).partition(".tar/")[2] for index in range(len(names))]
        assert [sample["__key__"] for sample in samples] == [key.rpartition(".")[0] for key in keys]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def image_bytes(seed: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (6, 4), (seed, 2 * seed, 9)).save(file, "PNG")
    return file.getvalue()


def test_shards_of_webdataset_are_read_and_numbers_sorted_as_numbers(tmp_path: Path):
    (tmp_path / "shards").mkdir()
    labels = [2, 10, 9, 2, 10, 9, 1, 1]
    for shard in range(2):
        with webdataset.TarWriter(str(tmp_path / "shards" / f"{shard:06}.tar")) as writer:
            for index in range(4 * shard, 4 * shard + 4):
                text = {"txt": "a caption", "seg.png": b"no image", "cls": labels[index]}
                writer.write({"__key__": f"{index % 4:06}", "png": image_bytes(index), **text})
    config = ShardsConfig(root=str(tmp_path / "shards"), validation_fraction=0)
    train, test = config.build("train"), config.build("test")
    assert train.class_names == ("1", "2") and test.class_names == ("9", "10")
    assert train.labels.tolist() == [1, 1, 0, 0] and test.labels.tolist() == [1, 0, 1, 0]
    assert train.paths[1] == str(tmp_path / "shards" / "000000.tar" / "000003.png")
    assert train.sample(1)[:, 0, 0].tolist() == [3, 6, 9]
    assert config.listing().notes == [
        f"{tmp_path / 'shards'}: the labels 1 to 10 have gaps: no image has label 3 (6 missing numbers); "
        "labels are renumbered, so no action is needed"
    ]


def tar(path: Path, members: list[tuple[str, bytes] | tarfile.TarInfo]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as file:
        for entry in members:
            if isinstance(entry, tarfile.TarInfo):
                file.addfile(entry)
            else:
                info = tarfile.TarInfo(entry[0])
                info.size = len(entry[1])
                file.addfile(info, io.BytesIO(entry[1]))
    return path


def sound(count: int = 4) -> list[Any]:
    """Images of two classes or more, two each."""
    return [
        entry
        for index in range(count)
        for entry in ((f"{index}.png", image_bytes(index)), (f"{index}.cls", f" {'abcd'[index // 2]}\n".encode()))
    ]


def link(name: str, kind: bytes = tarfile.SYMTYPE) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, "/etc/passwd"
    return info


PNG = image_bytes(1)
FAULTY = {
    "no label": ([("x.png", PNG)], "s.tar/x.png: no label; expected a .cls file, or a .json file with the key 'label'"),
    "empty label": ([("x.png", PNG), ("x.cls", b" ")], "s.tar/x.png: no label"),
    "no image": ([("x.cls", b"a")], r"s.tar: x has 0 images \(none\); expected one"),
    "two images": ([("x.png", PNG), ("x.jpg", PNG), ("x.cls", b"a")], r"has 2 images \(x.png, x.jpg\); expected one"),
    "twice": ([("x.png", PNG), ("x.cls", b"a"), ("./x.png", PNG)], "x.png is in this shard twice; give each image a"),
    "two labels": (
        [("x.png", PNG), ("x.cls", b"a"), ("x.json", b'{"label": "b"}')],
        "x.png: the label is 'a' in its .cls, but 'b' in its .json",
    ),
    "a link": ([link("x.png"), ("x.cls", b"a")], "x.png is a link or another special file, which is not read"),
    "a hard link": ([link("x.png", tarfile.LNKTYPE)], "x.png is a link or another special file"),
    "a device": ([link("x.png", tarfile.CHRTYPE)], "x.png is a link or another special file"),
    "a path upwards": ([("a/../../x.png", PNG)], r"a/../../x.png: this name leads out of the shard"),
    "an absolute path": ([("/etc/x.png", PNG)], "/etc/x.png: this name leads out of the shard"),
    "a name in Latin-1": (
        [(b"\xe9.png".decode(errors="surrogateescape"), PNG)],
        r"'\\udce9.png': this name is not UTF",
    ),
    "a label in Latin-1": ([("x.png", PNG), ("x.cls", b"\xe9")], "x.png: its label is not UTF-8"),
    "no JSON": ([("x.png", PNG), ("x.json", b"{")], "x.png: its .json cannot be read"),
    "deep JSON": ([("x.png", PNG), ("x.json", b"[" * 100_000)], "x.png: its .json cannot be read"),
    "a list": (
        [("x.png", PNG), ("x.json", b"[1]")],
        "its .json contains a list; expected an object with the key 'label'",
    ),
    "a label that is a list": (
        [("x.png", PNG), ("x.json", b'{"label": [1]}')],
        r"label \[1\] in its .json; expected te",
    ),
    "a huge label": ([("x.png", PNG), ("x.cls", b"a" * 1_000_001)], "x.cls has 1,000,001 bytes; expected at most"),
    "half a box": ([("x.png", PNG), ("x.json", b'{"label": "a", "x1": 1, "x2": 2}')], "has x1 and x2 without"),
    "a box of words": ([("x.png", PNG), ("x.json", b'{"label": "a", "x1": "left"}')], "x1 'left' in its .json"),
    "no box": (
        [("x.png", PNG), ("x.json", b'{"label": "a", "x1": 3, "x2": 2, "y1": 0, "y2": 1}')],
        "s.tar/x.png: got the box x1 3, y1 0, x2 2, y2 1; expected 0 <= x1 < x2",
    ),
}


@pytest.mark.parametrize("name", FAULTY)
def test_a_fault_of_an_image_is_told_and_nothing_is_extracted(name: str, dmlkit, tiny_recipe: Path, tmp_path: Path):
    members, told = FAULTY[name]
    tar(tmp_path / "shards" / "s.tar", sound() + members)
    config = ShardsConfig(root=str(tmp_path / "shards"), validation_fraction=0)
    for _ in range(2):  # found by the headers, then by the index
        with pytest.raises(UserError, match=told):
            config.build("train")
    assert names(tmp_path) == ["shards", "tiny.yaml"] and names(tmp_path / "shards") == ["s.tar", "shards.parquet"]
    if name != "half a box":
        checked = dmlkit("data", "check", tmp_path / "shards")
        assert checked.code == 1 and re.search(r"\d errors? found$", checked.out.rstrip())


def cut(share: float) -> Callable[[bytes], bytes]:
    return lambda content: content[: int(share * len(content))]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (cut(0.5), "s.tar: .*truncated, damaged or compressed: download or write it again"),
        (lambda content: content[: 8 * 1024], "s.tar: this tar file has no end"),  # after the last image
        (lambda content: content[: 3 * 1024 + 100], "s.tar: this tar file has no end"),  # within a header
        (lambda content: content[:2048] + b"\xff" * 512 + content[2560:], "has data after its end at byte 2,048"),
        (lambda content: content + content, "this tar file has data after its end at byte 8,192"),
        (lambda content: __import__("gzip").compress(content), "damaged or compressed"),
        (lambda content: b"", "s.tar: empty file"),
        (lambda content: b"no tar" * 1000, "damaged or compressed"),
    ],
    ids=["half", "no end", "half a header", "a damaged header", "two in one", "compressed", "empty", "text"],
)
def test_a_shard_that_is_not_whole_is_told(change: Callable[[bytes], bytes], told: str, tmp_path: Path):
    path = tar(tmp_path / "s.tar", sound())
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(UserError, match=told):
        ShardsConfig(root=str(tmp_path), validation_fraction=0).build("train")


def test_damaged_headers_end_in_a_line_or_in_nothing(tmp_path: Path):
    """A flipped byte anywhere in the headers: the images are as before, or fewer with a fault."""
    content = tar(tmp_path / "s.tar", sound(2)).read_bytes()
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        place, value = (int(torch.randint(top, (1,), generator=generator)) for top in (512, 256))
        damaged = bytearray(content)
        damaged[place] = value
        (tmp_path / "s.tar").write_bytes(damaged)
        (tmp_path / "shards.parquet").unlink(missing_ok=True)
        listing = ShardsConfig(root=str(tmp_path)).listing()
        assert listing.faults or len(listing.labels) == 2


def test_folders_without_shards_are_told(tmp_path: Path):
    for make, told in (
        (lambda root: None, "no such folder; expected one with tar files"),
        (lambda root: root.mkdir(), r"no tar files in this folder; expected \*.tar"),
        (lambda root: tar(root / "train" / "0.tar", sound()), "has a folder 'train' but no folder 'test'; add it"),
        (lambda root: (root / "test").mkdir(), "test: no tar files in this folder"),
        (
            lambda root: (root / "test" / "1.tar.gz").write_bytes(b""),
            "1.tar.gz: images cannot be read from a compressed tar file",
        ),
    ):
        make(tmp_path / "shards")
        with pytest.raises(UserError, match=told):
            ShardsConfig(root=str(tmp_path / "shards")).build("train")
    tar(tmp_path / "more" / "train" / "0.tar", sound())
    tar(tmp_path / "more" / "test" / "0.tar", sound())
    with pytest.raises(UserError, match="class 'a' is in both train and test"):
        ShardsConfig(root=str(tmp_path / "more")).build("train")


def test_images_beyond_the_limits_and_broken_ones_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = io.BytesIO()
    Image.new("1", (9000, 9000)).save(file, "PNG")
    entries = [(f"{index}.cls", b"a") for index in range(4)]
    entries += [("0.png", file.getvalue()), ("1.png", b""), ("2.png", b"no image"), ("3.png", PNG)]
    tar(tmp_path / "s.tar", [*entries, ("4.png", PNG), ("4.cls", b"b"), ("5.png", PNG), ("5.cls", b"b")])
    images = ShardsConfig(root=str(tmp_path), validation_fraction=0).build("train")
    monkeypatch.setattr(reading, "MAX_BYTES", len(file.getvalue()))
    for index, told in enumerate(
        ("9000 x 9000 pixels; expected at most", "the file is empty", "has no known image format")
    ):
        for read in (images.sample, lambda index: read_image(images.paths[index])):
            with pytest.raises(BadImageError, match=rf"s.tar/{index}.png: .*{told}"):
                read(index)
    assert images.sample(3).shape == (3, 4, 6)
    monkeypatch.setattr(reading, "MAX_BYTES", len(PNG) - 1)
    with pytest.raises(BadImageError, match=rf"3.png: .*the image has {len(PNG)} bytes; expected at most"):
        images.sample(3)


@pytest.fixture
def shards(tmp_path: Path) -> ShardsConfig:
    return sharded(FolderConfig(root=str(photos(tmp_path / "photos")), validation_fraction=0), tmp_path / "shards")


def test_shards_are_gone_through_once(shards: ShardsConfig, monkeypatch: pytest.MonkeyPatch):
    before = shards.build("train")
    monkeypatch.setattr(indexing, "scan_shard", None)
    assert_same(shards.build("train"), before)


def test_a_changed_shard_is_told_and_indexed_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch):
    for number in range(3):
        tar(tmp_path / f"{number}.tar", sound())
    config = ShardsConfig(root=str(tmp_path), validation_fraction=0)
    images = config.build("all")
    images.sample(0)
    tar(tmp_path / "0.tar", list(reversed(sound())))
    os.utime(tmp_path / "0.tar", ns=(1, 1))
    with pytest.raises(
        BadImageError, match=r"0\.tar has changed since the command started to read it; rerun the command"
    ):
        images.sample(0)
    assert images.sample(4).shape == (3, 4, 6)
    (tmp_path / "2.tar").unlink()
    with pytest.raises(BadImageError, match="file not found"):
        images.sample(8)
    scanned: list[str] = []
    scan = indexing.scan_shard
    monkeypatch.setattr(indexing, "scan_shard", lambda root, shard: scanned.append(shard) or scan(root, shard))
    again = config.build("all")
    assert [Path(path).name for path in again.paths[:4]] == ["3.png", "2.png", "1.png", "0.png"] and len(again) == 8
    assert again.sample(0)[0, 0, 0] == 3 and scanned == ["0.tar"]
    assert caplog.messages == [
        f"{tmp_path / 'shards.parquet'}: shards changed or removed since it was written: 0.tar, 2.tar; "
        "the index is updated"
    ]


def test_what_dmlkit_wrote_is_missed_when_it_is_gone(shards: ShardsConfig):
    root = Path(shards.root)
    (root / "train" / "000001.tar").rename(root / "train" / "5.tar")
    with pytest.raises(UserError) as error:
        shards.build("train")
    first, second = str(error.value).splitlines()
    assert first.startswith(f"{root / 'train' / '000001.tar'}: no such file, but {root / 'shards.json'} lists it")
    reason = f"this shard is not listed in {root / 'shards.json'}; remove one of the two files"
    assert second == f"{root / 'train' / '5.tar'}: {reason}"
    (root / "train" / "5.tar").unlink()
    tar(root / "train" / "000001.tar", [("0.png", PNG), ("0.cls", b"crow")])
    with pytest.raises(UserError) as error:
        shards.build("train")
    assert "class 'crow' is not in" in str(error.value) and "has 1 valid images, expected 5 according to" in str(
        error.value
    )


@pytest.mark.parametrize("content", [b"", b"no parquet", b"PAR1" + bytes(100) + b"PAR1", None], ids=str)
def test_an_index_that_is_none_is_told_and_never_replaced(content: bytes | None, shards: ShardsConfig):
    path = Path(shards.root) / "shards.parquet"
    damaged = bytearray(path.read_bytes())
    damaged[60] ^= 255  # of a page, whose checksum tells
    path.write_bytes(damaged if content is None else content)
    with pytest.raises(UserError, match=r"shards.parquet: cannot read this index of shards: .*remove it so that it is"):
        shards.build("train")
    path.unlink()
    assert shards.build("train").sample(0).shape == (3, 18, 24)


def test_a_parquet_file_of_others_is_no_index(tmp_path: Path):
    config = TableConfig(file=str(table(tmp_path)))
    from pyarrow import csv, parquet

    parquet.write_table(csv.read_csv(config.file), tmp_path / "shards.parquet")
    tar(tmp_path / "0.tar", sound())
    with pytest.raises(
        UserError, match="is not an index of shards that dmlkit wrote; remove it so that it is written again"
    ):
        ShardsConfig(root=str(tmp_path)).build("train")


def test_the_index_may_lie_elsewhere_and_a_read_only_folder_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    tar(tmp_path / "shards" / "0.tar", sound())
    config = ShardsConfig(root=str(tmp_path / "shards"), validation_fraction=0)
    elsewhere = config.model_copy(update={"index": str(tmp_path / "new" / "i.parquet")})
    images = elsewhere.build("all")
    assert names(tmp_path / "shards") == ["0.tar"] and names(tmp_path / "new") == ["i.parquet"]
    monkeypatch.setattr(indexing, "_is_writable", lambda folder: False)  # root may write anywhere
    assert_same(config.build("all"), images)
    assert names(tmp_path / "shards") == ["0.tar"]
    (told,) = caplog.messages
    assert told.endswith(
        "so the shards are indexed again at every start; set dataset.index to a file in a writable folder"
    )


def test_of_processes_that_start_together_one_goes_through_the_shards(tmp_path: Path):
    for number in range(20):
        tar(tmp_path / f"{number:02}.tar", sound())
    context = get_context("fork")
    processes = [context.Process(target=_build, args=(str(tmp_path), str(tmp_path / "scans"))) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(END)
        assert process.exitcode == 0
    assert sorted((tmp_path / "scans").read_text().splitlines()) == [f"{number:02}.tar" for number in range(20)]


def _build(root: str, log: str) -> None:
    scan = indexing.scan_shard

    def told(root: Path, shard: str) -> Any:
        with Path(log).open("a") as file:
            file.write(f"{shard}\n")
        return scan(root, shard)

    indexing.scan_shard = told
    assert len(ShardsConfig(root=root, validation_fraction=0).build("all")) == 80


@pytest.mark.parametrize("context", [get_context("fork"), WARM], ids=["fork", "forkserver"])
def test_loader_processes_read_what_this_one_reads(context: Any, shards: ShardsConfig):
    images = shards.build("train")
    images.sample(0)  # opens files before the processes begin
    transform = TransformConfig.variants["plain"](size=16)
    alone, loader = (evaluation_loader(images, transform, batch_size=4, workers=workers) for workers in (0, 2))
    loader.multiprocessing_context = context  # a forkserver sends the dataset, as spawn does
    for one, other in zip(alone, loader, strict=True):
        assert torch.equal(one.inputs, other.inputs) and torch.equal(one.labels, other.labels)


def test_open_files_are_bounded_and_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    count = reading.MOST_OPEN + 30
    for number in range(count):
        tar(tmp_path / f"{number:03}.tar", sound())
    images = ShardsConfig(root=str(tmp_path), validation_fraction=0).build("all")
    reading._opened.cache_clear()
    before = len(names(Path("/proc/self/fd")))
    for index in range(0, len(images), 4):
        images.sample(index)
    assert len(names(Path("/proc/self/fd"))) == before + reading.MOST_OPEN
    reading._opened.cache_clear()
    assert len(names(Path("/proc/self/fd"))) == before


def test_images_are_found_by_their_paths_with_and_without_an_index(shards: ShardsConfig, tmp_path: Path):
    images = shards.build("test")
    for _ in range(2):
        reading._places.cache_clear()
        for index in (0, len(images) - 1):
            assert torch.equal(read_image(images.paths[index]), images.sample(index))
        with pytest.raises(BadImageError, match=r"000000.tar/none.jpg: cannot read this image: file not found"):
            read_image(f"{shards.root}/test/000000.tar/none.jpg")
        (Path(shards.root) / "shards.parquet").unlink(missing_ok=True)
    folder = trees.photo(tmp_path / "folder.tar" / "a.jpg", 1)  # a folder may be called so
    assert read_image(folder).shape == (3, 18, 24)


def test_shards_are_checked_embedded_and_shown(dmlkit, tiny_recipe: Path, shards: ShardsConfig, tmp_path: Path):
    assert dmlkit("data", "check", shards.root).out.endswith("no errors found\n")
    dataset = f"dataset={{name: shards, root: {shards.root}, validation_fraction: 0}}"
    run, stored, page = tmp_path / "run", tmp_path / "stored", tmp_path / "page.html"
    options = ("--device", "cpu", "--set", "training.epochs=1", "--set", "sampler.batch_size=4")
    assert dmlkit("train", tiny_recipe, "-o", run, "--set", dataset, *options).code == 0
    assert "48 embeddings" in dmlkit("embed", run, shards.root, "-o", stored, "--device", "cpu").out
    found = dmlkit("search", stored, tmp_path / "photos" / CLASSES[0], "--run", run, "--html", page, "--device", "cpu")
    assert found.code == 0 and ".tar/class" in re.sub("[\\s│]", "", found.out)  # a cell breaks where a path is long
    assert page.read_text().count("<img") == 4 * 11 and "no picture" not in page.read_text()
    refused = dmlkit("gallery", "create", run, shards.root, "-o", tmp_path / "gallery")
    assert (
        refused.code == 2
        and "contains shards; expected image files, or a table of paths SHARD.tar/KEY.jpg" in refused.err
    )


def test_a_cache_knows_when_a_shard_has_changed(dmlkit, tiny_recipe: Path, shards: ShardsConfig, tmp_path: Path):
    dataset = f"dataset={{name: shards, root: {shards.root}, validation_fraction: 0}}"
    cached = ("--set", dataset, "--set", f"dataset.cache={tmp_path / 'cache'}")
    assert dmlkit("data", "cache", tiny_recipe, "-o", tmp_path / "cache", "--set", dataset).code == 0
    assert dmlkit("train", tiny_recipe, "-o", tmp_path / "run", *cached, "--dry-run").code == 0
    os.utime(Path(shards.root) / "train" / "000000.tar", ns=(1, 1))
    refused = dmlkit("train", tiny_recipe, "-o", tmp_path / "run", *cached, "--dry-run")
    assert refused.code == 2 and "000000.tar/class a/0_v2.jpg has changed since" in refused.err
