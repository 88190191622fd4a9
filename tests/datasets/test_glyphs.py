"""Glyphs: the same images everywhere, and classes that differ."""

import hashlib
import unicodedata
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

from dmlkit.datasets import GlyphsConfig
from dmlkit.datasets.base import Split
from dmlkit.datasets.files.dataset import Dataset
from dmlkit.datasets.glyphs import FACES, Glyphs, character_classes, distinct_characters, font, render
from tests.conftest import refuses


def test_no_two_classes_look_alike_and_none_is_blank():
    characters = list(distinct_characters()[:300])
    assert all(render(character, 0, 32, seed=0).min() < 140 for character in characters)  # ink
    looks = set[bytes]()  # without noise and the turn, which no two characters share
    for character in characters:
        canvas = Image.new("L", (64, 64))
        ImageDraw.Draw(canvas).text((32, 32), character, fill=255, font=font(FACES[0], 42), anchor="mm")
        looks.add(canvas.reduce(2).tobytes())
    assert len(looks) == len(characters)


CLEAN: tuple[Split, ...] = ("validation", "test", "all")


def as_in_0_1_0(character: str, image: int, size: int, seed: int) -> np.ndarray:
    """How dmlkit 0.1.0 drew a glyph, word by word."""
    generator = np.random.default_rng([1, seed, ord(character), image])
    angle, shift = generator.uniform(-12, 12), generator.uniform(-0.06, 0.06, 2)
    scale, noise = generator.uniform(0.8, 1.05), generator.uniform(0, 16)
    canvas = Image.new("L", (2 * size, 2 * size), 0)
    ImageDraw.Draw(canvas).text(
        (size + 2 * size * shift[0], size + 2 * size * shift[1]),
        character,
        fill=255,
        font=font(FACES[image % len(FACES)], round(1.3 * size * scale)),
        anchor="mm",
    )
    ink = np.asarray(canvas.rotate(angle, Image.Resampling.BILINEAR).reduce(2), dtype=np.float64)
    return (255 - ink + generator.normal(0, noise, ink.shape)).clip(0, 255).astype(np.uint8)


def shown(glyphs: Dataset) -> list[str]:
    """The character that each image shows."""
    return [chr(int(path.partition("/")[0].removeprefix("U+"), 16)) for path in glyphs.paths]


@pytest.mark.parametrize("keys", [{"images_per_class": 13, "size": 24, "seed": 3}, {"shapes_per_class": 2}])
def test_by_default_the_images_are_those_of_0_1_0(keys: dict[str, int]):
    """They depend on their character, their number, the seed and the size alone."""
    config = GlyphsConfig(classes=8, **keys)
    glyphs = config.build("test")
    for index, character in enumerate(shown(glyphs)):
        expected = as_in_0_1_0(character, int(glyphs.paths[index].partition("/")[2]), config.size, config.seed)
        assert glyphs.sample(index)[0].numpy().tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("split", "digest"), [("train", "e9e40b72"), ("validation", "0555a351"), ("test", "5f3dbb0a"), ("all", "1ce8c728")]
)
def test_by_default_labels_classes_and_names_are_those_of_0_1_0(split: Split, digest: str):
    glyphs = GlyphsConfig(classes=200, images_per_class=5).build(split)
    known = repr((glyphs.labels.tolist(), list(glyphs.class_names), list(glyphs.paths)))
    assert hashlib.sha256(known.encode()).hexdigest()[:8] == digest


def test_a_class_of_three_shapes_has_a_third_of_its_images_of_each():
    glyphs = GlyphsConfig(classes=40, images_per_class=12, shapes_per_class=3).build("all")
    seen: set[str] = set()
    for label, name in enumerate(glyphs.class_names):
        own = [character for character, other in zip(shown(glyphs), glyphs.labels, strict=True) if other == label]
        assert [own.count(character) for character in dict.fromkeys(own)] == [4, 4, 4]
        assert name == "-".join(f"U+{ord(character):04X}" for character in dict.fromkeys(own))
        assert not seen & set(own)  # no character is of two classes
        seen |= set(own)
    assert len(set(glyphs.paths)) == len(glyphs)


@pytest.mark.parametrize("shapes", [2, 3])
def test_shapes_of_a_class_are_of_different_scripts(shapes: int):
    """A script appears twice only where it has more characters than there are classes."""
    classes = character_classes(100, shapes)
    scripts = [[unicodedata.name(character).split()[0] for character in own] for own in classes]
    everywhere = [script for own in scripts for script in own]
    for own in scripts:
        assert all(own.count(script) == 1 or everywhere.count(script) > 100 for script in own)
    assert sum(len(set(own)) == shapes for own in scripts) >= 90


def test_the_shares_of_wrong_labels_are_exact_and_validation_and_test_are_clean():
    keys: dict[str, Any] = {"classes": 40, "images_per_class": 10, "shapes_per_class": 3, "validation_fraction": 0.25}
    clean, noisy = GlyphsConfig(**keys), GlyphsConfig(**keys, noise=0.2)
    train, other = clean.build("train"), noisy.build("train")
    assert train.class_names == other.class_names and list(train.paths) == list(other.paths)
    wrong = train.labels != other.labels
    assert int(wrong.sum()) == round(0.2 * len(train)) == 30
    assert (train.sample(7) == other.sample(7)).all() and train.key(7) == other.key(7)
    assert len(other.labels[wrong].unique()) > 5  # of all classes, not of one
    for split in CLEAN:
        assert (clean.build(split).labels == noisy.build(split).labels).all()
    assert (noisy.build("train").labels == other.labels).all()  # the same each time
    assert (GlyphsConfig(**keys, noise=0.2, seed=1).build("train").labels != other.labels).any()


def test_a_fold_that_validates_has_no_wrong_labels():
    keys: dict[str, Any] = {"classes": 32, "images_per_class": 6, "split": "reality_check", "fold": 2}
    clean, noisy = GlyphsConfig(**keys), GlyphsConfig(**keys, noise=0.5, tail=3.0)
    assert int((clean.build("train").labels.bincount() != noisy.build("train").labels.bincount()).sum()) > 0
    for split in CLEAN[:2]:
        assert (clean.build(split).labels == noisy.build(split).labels).all()


def test_a_tail_falls_geometrically_over_the_training_classes_alone():
    keys: dict[str, Any] = {"classes": 22, "images_per_class": 32, "validation_fraction": 0.2}
    tailed = GlyphsConfig(**keys, tail=16.0)
    train = tailed.build("train")  # 8 classes; 3 validate
    assert train.labels.bincount().tolist() == [round(32 * 16 ** (-label / 7)) for label in range(8)]
    assert int(train.labels.bincount()[0]) == 32 and int(train.labels.bincount()[-1]) == 2
    for split in CLEAN[:2]:
        assert set(tailed.build(split).labels.bincount().tolist()) == {32}
    both = GlyphsConfig(**keys, tail=16.0, noise=0.1).build("train")
    assert int((both.labels != train.labels).sum()) == round(0.1 * len(train))


def test_difficulty_makes_images_of_a_class_differ_more():
    """The mean squared difference of two images of a class: 3 428 of easy ones, 4 936 of the hardest."""
    unlike: list[float] = []
    for difficulty in (0.0, 0.5, 1.0):
        pixels = Glyphs(list("aЖ→"), 24, 32, 0, difficulty=difficulty).pixels.double().view(3, 24, -1)
        unlike.append(float(torch.cdist(pixels, pixels).square().mean() / 32**2))
    assert unlike[0] < unlike[1] < unlike[2] and unlike[2] > 1.4 * unlike[0]
    assert (render("a", 0, 32, 0, 1.0) == render("a", 0, 32, 0, 1.0)).all()


@pytest.mark.parametrize(
    ("keys", "split", "message"),
    [
        ({"classes": 800, "shapes_per_class": 3}, "test", "dataset.classes: .* the fonts have only"),
        ({"images_per_class": 4, "shapes_per_class": 5}, "test", "images_per_class: got 4, expected at least 5"),
        ({"images_per_class": 6, "tail": 4.0}, "train", "dataset.tail: 4 leaves fewer than 2 .* expected at most 3"),
        ({"classes": 6, "noise": 0.1}, "train", "dataset.noise: there is only one training class"),
    ],
)
def test_what_cannot_be_drawn_is_one_line(keys: dict[str, Any], split: Split, message: str):
    refuses(message, GlyphsConfig(**keys).build, split)
