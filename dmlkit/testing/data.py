"""The contracts of datasets, transforms and augmentations."""

import pickle
from collections.abc import Sequence
from itertools import combinations
from multiprocessing.reduction import ForkingPickler

import torch
from torch import Tensor

from dmlkit.datasets.base import DatasetConfig, Split
from dmlkit.datasets.files.dataset import Dataset
from dmlkit.datasets.glyphs import Glyphs
from dmlkit.loading.inputs import TransformedImages
from dmlkit.testing.promise import expect, hold
from dmlkit.transforms.augmentations import AugmentationConfig, ImageTransform
from dmlkit.transforms.base import TransformConfig

LOOKED_AT = 8  # images checked per split, evenly spaced: a dataset may have a million


def check_dataset(config: DatasetConfig) -> None:
    """Check a configured dataset against its contract; the files that it reads must exist.

    Labels, names and paths of every split are consistent; no class of the test split is in training or validation, or
    no image where test images are of known classes; images are uint8 RGB, vectors float32, the same at each call;
    building the dataset again gives the same.

    Example:
        >>> from dmlkit.datasets import GlyphsConfig
        >>> check_dataset(GlyphsConfig(classes=20, images_per_class=3, size=16))
    """
    promises = [
        labels_names_and_paths_fit_together,
        splits_share_no_class,
        samples_are_of_one_kind_and_stay_the_same,
        copies_are_the_same,
    ]
    hold(promises, config.name, config)


def splits_of(config: DatasetConfig) -> dict[Split, Dataset]:
    """Return the splits of the dataset."""
    names: tuple[Split, ...] = (*config.own_splits, "all")
    return {name: config.build(name) for name in names}


def labels_names_and_paths_fit_together(config: DatasetConfig) -> None:
    """Check that labels are 0..C-1 with C names, images have distinct keys, and masks and groups the right shapes."""
    for split, dataset in splits_of(config).items():
        labels, count, classes = dataset.labels, len(dataset), len(dataset.class_names)
        is_right = labels.dtype == torch.int64 and labels.shape == (count,)
        expect(is_right, f"{split}: labels are {labels.dtype} of shape {tuple(labels.shape)}")
        expect(count > 0, f"{split}: no images")
        codes = labels.unique().tolist()
        expect(codes == list(range(classes)), f"{split}: labels {codes[:3]}..{codes[-1]} of {classes} class names")
        expect(len(set(dataset.class_names)) == classes, f"{split}: two classes have the same name")
        expect(len(dataset.paths) == count, f"{split}: {len(dataset.paths)} paths for {count} images")
        named: dict[str, Sequence[object]] = {"class name": dataset.class_names, "path": dataset.paths}
        for what, names in named.items():
            other = next((name for name in names if not isinstance(name, str)), None)
            expect(other is None, f"{split}: the {what} {other!r} is no string")
        groups = dataset.groups
        fits = groups is None or (groups.dtype == torch.int64 and groups.shape == (count,))
        expect(fits, f"{split}: groups is not int64 of shape ({count},)")
        expect(len({dataset.key(index) for index in range(count)}) == count, f"{split}: two images have the same key")
        for name, mask in (("query", dataset.query), ("gallery", dataset.gallery)):
            fits = mask is None or (mask.dtype == torch.bool and mask.shape == (count,))
            expect(fits, f"{split}: {name} is not bool of shape ({count},)")
        expect((dataset.query is None) == (dataset.gallery is None), f"{split}: query or gallery without the other")
        coarse = dataset.super_classes
        fits = coarse is None or (coarse.dtype == torch.int64 and coarse.shape == (classes,) and int(coarse.min()) >= 0)
        expect(fits, f"{split}: super_classes is not int64 of shape ({classes},), from 0")


def splits_share_no_class(config: DatasetConfig) -> None:
    """Check that training, validation and test share no class, and that split all contains all their images.

    Where test images are of known classes, the splits share no image instead.
    """
    splits = splits_of(config)
    keys = {split: [*map(images.key, range(len(images)))] for split, images in splits.items()}
    known = {*keys.pop("all")}
    names = keys if config.tests_known else {split: splits[split].class_names for split in splits if split != "all"}
    for (first, of_first), (second, of_second) in combinations(names.items(), 2):
        shared = sorted({*of_first} & {*of_second})
        expect(not shared, f"{first} and {second} share {', '.join(shared[:3])}")
    for split, of_split in keys.items():
        missing = [key for key in of_split if key not in known]
        expect(not missing, f"{split} has {', '.join(missing[:3])}, which split all does not have")


def samples_are_of_one_kind_and_stay_the_same(config: DatasetConfig) -> None:
    """Check that an image is (3, H, W) uint8, or a vector (F,) float32, the same at each call, with its label."""
    for split, dataset in splits_of(config).items():
        message = f"{split}: the samples are {dataset.kind.name}s, but the dataset contains {config.sample}s"
        expect(dataset.kind.name == config.sample, message)
        for index in range(0, len(dataset), max(1, len(dataset) // LOOKED_AT)):
            sample, where = dataset.sample(index), f"{split}, {config.sample} {index}"
            fault = dataset.kind.fault(sample)
            expect(fault is None, f"{where}: {fault}")
            again, label = dataset[index]
            expect(torch.equal(again, sample), f"{where}: the second call returned other values")
            expect(label == int(dataset.labels[index]), f"{where}: got label {label}, expected {dataset.labels[index]}")


def copies_are_the_same(config: DatasetConfig) -> None:
    """Check that neither building a split again nor sending it to worker processes changes the copy or the original.

    macOS and Windows start new processes for workers, and tensors then move to shared memory.
    """
    for split, dataset in splits_of(config).items():
        rows = range(len(dataset))
        paths, keys = [dataset.paths[row] for row in rows], [dataset.key(row) for row in rows]
        copies: dict[str, Dataset] = {
            "built again": config.build(split),
            "sent to a worker": pickle.loads(ForkingPickler.dumps(dataset)),
            "in the main process after sending": dataset,
        }
        for where, copy in copies.items():
            expect(torch.equal(copy.labels, dataset.labels), f"{split}: labels differ {where}")
            expect(copy.class_names == dataset.class_names, f"{split}: class names differ {where}")
            expect([copy.paths[row] for row in rows] == paths, f"{split}: paths differ {where}")
            expect([copy.key(row) for row in rows] == keys, f"{split}: images or their order differ {where}")
            expect(torch.equal(copy.sample(0), dataset.sample(0)), f"{split}: sample 0 differs {where}")


def check_transform(config: TransformConfig) -> None:
    """Check a transform against its contract: uint8 squares of the configured size, random only in training.

    Example:
        >>> from dmlkit.transforms import PlainConfig
        >>> check_transform(PlainConfig(size=32))
    """
    promises = [
        images_become_squares,
        a_flat_image_keeps_its_color,
        augmentation_follows_the_draw_alone,
        other_processes_can_have_the_transform,
    ]
    hold(promises, config.name, config)


def check_augmentation(config: AugmentationConfig) -> None:
    """Check an augmentation against its contract: uint8 images keep their shape, random only by torch's generator.

    Example:
        >>> from dmlkit.transforms.augmentations import RandomErasingConfig
        >>> check_augmentation(RandomErasingConfig(p=1.0))
    """
    promises = [images_keep_shape_and_type, random_numbers_come_from_torch, other_processes_can_have_the_augmentation]
    hold(promises, config.name, config)


def images_become_squares(config: TransformConfig) -> None:
    """Check that an image of any shape becomes (3, size, size) uint8, in training and in evaluation."""
    for shape in ((3, 300, 200), (3, 32, 32), (3, 17, 500)):
        image = torch.randint(0, 256, shape, dtype=torch.uint8)
        for kind, transform in (("training", config.training()), ("evaluation", config.evaluation())):
            result = transform(image)
            message = f"{kind}: got {tuple(result.shape)} {result.dtype} for shape {shape}"
            expect(result.shape == (3, config.size, config.size) and result.dtype == torch.uint8, message)


def a_flat_image_keeps_its_color(config: TransformConfig) -> None:
    """Check that in evaluation the center of a single-color image keeps its color."""
    image = torch.tensor([10, 100, 200], dtype=torch.uint8).view(3, 1, 1).expand(3, 60, 80)
    color = config.evaluation()(image)[:, config.size // 2, config.size // 2].tolist()
    expect(color == [10, 100, 200], f"got {color}, expected [10, 100, 200]")


def augmentation_follows_the_draw_alone(config: TransformConfig) -> None:
    """Check that a draw's seed determines its augmentation and that the model's random state is not used."""
    images = TransformedImages(Glyphs(["a", "b"], 4, 32, 0), config, training=True)
    state = torch.get_rng_state()
    items = [images[1, seed] for seed in (0, *range(20))]  # a flip has two results
    first, same, *others = (item.input for item in items if item.input is not None)
    expect(torch.equal(torch.get_rng_state(), state), "it changes the model's random state")
    expect(torch.equal(first, same), "the same draw gives different pixels")
    differs = not all(torch.equal(first, other) for other in others)
    expect(differs == config.augments, f"augments is {config.augments}, but another draw differs: {differs}")


def other_processes_can_have_the_transform(config: TransformConfig) -> None:
    """Check that a copy sent to a worker process, as macOS and Windows start them, gives the same pixels."""
    image = torch.arange(3 * 40 * 60).view(3, 40, 60).remainder(256).to(torch.uint8)
    for transform in (config.training(), config.evaluation()):
        _a_copy_gives_the_same_pixels(transform, image)


def _a_copy_gives_the_same_pixels(transform: ImageTransform, image: Tensor) -> None:
    try:
        sent = pickle.loads(pickle.dumps(transform))
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise AssertionError(f"cannot be sent to another process: {error}") from error
    pixels: list[Tensor] = []
    for change in (transform, sent):
        torch.manual_seed(0)
        pixels.append(change(image))
    expect(torch.equal(*pixels), "another process gives different pixels")


def images_keep_shape_and_type(config: AugmentationConfig) -> None:
    """Check that an image (3, S, S) uint8 becomes such an image, in memory of its own, and that its input stays."""
    change = config.build()
    for side in (17, 32):
        image = torch.randint(0, 256, (3, side, side), dtype=torch.uint8)
        before = image.clone()
        for _ in range(4):
            result = change(image)
            is_alike = result.shape == image.shape and result.dtype == torch.uint8
            expect(is_alike, f"got {tuple(result.shape)} {result.dtype}")
            expect(torch.equal(image, before), "it changes its input")


def random_numbers_come_from_torch(config: AugmentationConfig) -> None:
    """Check that torch's generator determines the result, and that it changes images."""
    image = torch.randint(0, 256, (3, 32, 32), dtype=torch.uint8)
    change, changed_images = config.build(), list[Tensor]()
    for seed in range(20):
        for _ in range(2):
            torch.manual_seed(seed)
            changed_images.append(change(image))
        expect(torch.equal(*changed_images[-2:]), "the same seed gives different pixels")
    expect(not all(torch.equal(result, image) for result in changed_images), "20 seeds leave the image unchanged")


def other_processes_can_have_the_augmentation(config: AugmentationConfig) -> None:
    """Check that a copy sent to a worker process, as macOS and Windows start them, gives the same pixels."""
    _a_copy_gives_the_same_pixels(config.build(), torch.randint(0, 256, (3, 32, 32), dtype=torch.uint8))
