"""Glyphs: the same images everywhere, and classes that differ."""

import numpy as np

from dmlkit.datasets import GlyphsConfig
from dmlkit.datasets.glyphs import Glyphs, distinct_characters, render


def test_images_depend_on_their_own_place_alone():
    small = GlyphsConfig(classes=8, images_per_class=3, validation_fraction=0.0)
    large = GlyphsConfig(classes=8, images_per_class=5, validation_fraction=0.0)
    for split in ("train", "test"):
        few, many = small.build(split), large.build(split)
        for index, path in enumerate(few.paths):
            assert (few.sample(index) == many.sample(many.paths.index(path))).all()
    assert (render("a", 0, 32, seed=0) != render("a", 0, 32, seed=1)).any()


def test_splits_share_no_class_and_validation_comes_out_of_training():
    config = GlyphsConfig(classes=20, images_per_class=2, validation_fraction=0.25)
    train, validation, test = (config.build(split) for split in ("train", "validation", "test"))
    assert [len(part.class_names) for part in (train, validation, test)] == [7, 3, 10]
    names = [name for part in (train, validation, test) for name in part.class_names]
    assert len(set(names)) == 20
    assert sorted(train.labels.unique().tolist()) == list(range(7))


def test_no_two_classes_look_alike_and_none_is_blank():
    characters = list(distinct_characters()[:300])
    images = [render(character, 0, 32, seed=0) for character in characters]
    assert min(image.min() for image in images) < 128  # ink
    assert all(image.min() < 140 for image in images)
    same_noise = {character: Glyphs([character], 1, 32, 0).pixels.numpy().tobytes() for character in characters}
    assert len(set(same_noise.values())) == len(characters)


def test_classes_can_be_told_apart_but_not_trivially():
    """Nearest class mean over pixels: far above chance (1 %), far below a trained network (98 %)."""
    glyphs = GlyphsConfig(classes=200, validation_fraction=0.0).build("test")
    pixels = np.stack([glyphs.sample(index)[0].numpy().ravel() for index in range(len(glyphs))]).astype(float)
    labels = glyphs.labels.numpy()
    even = np.arange(len(labels)) % 2 == 0
    means = np.stack([pixels[even & (labels == label)].mean(0) for label in range(100)])
    guess = ((pixels[~even, None] - means) ** 2).sum(-1).argmin(1)
    accuracy = (guess == labels[~even]).mean()
    assert 0.1 < accuracy < 0.9
