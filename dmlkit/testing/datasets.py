"""The contract of datasets."""

import pickle
from itertools import combinations
from multiprocessing.reduction import ForkingPickler

import torch

from dmlkit.datasets.base import DatasetConfig, Split
from dmlkit.datasets.files.dataset import Dataset
from dmlkit.testing.promise import Promise, a_line_of_help_says_what_it_is, expect, hold

LOOKED_AT = 8  # images checked per split, evenly spaced: a dataset may have a million


def check_dataset(config: DatasetConfig) -> None:
    """Check a configured dataset against its contract; the files that it reads must exist.

    Labels, names and paths of every split are consistent; no class of the test split is in training or validation;
    images are uint8 RGB, vectors float32, the same at each call; building the dataset again gives the same.

    Raises:
        AssertionError: the contract is broken; the message says how.

    Example:
        >>> from dmlkit.datasets import GlyphsConfig
        >>> check_dataset(GlyphsConfig(classes=20, images_per_class=3, size=16))
    """
    hold(DATASET, config.name, config)


def splits_of(config: DatasetConfig) -> dict[Split, Dataset]:
    """Return the splits of the dataset."""
    names: tuple[Split, ...] = (*config.own_splits, "all")
    return {name: config.build(name) for name in names}


def labels_names_and_paths_fit_together(config: DatasetConfig) -> None:
    """Check that labels are 0..C-1 with C names, images have distinct keys, and masks have the right shapes."""
    for split, dataset in splits_of(config).items():
        labels, count, classes = dataset.labels, len(dataset), len(dataset.class_names)
        is_right = labels.dtype == torch.int64 and labels.shape == (count,)
        expect(is_right, f"{split}: labels are {labels.dtype} of shape {tuple(labels.shape)}")
        expect(count > 0, f"{split}: no images")
        found = labels.unique().tolist()
        expect(found == list(range(classes)), f"{split}: labels {found[:3]}..{found[-1]} of {classes} class names")
        expect(len(set(dataset.class_names)) == classes, f"{split}: two classes have the same name")
        expect(len(dataset.paths) == count, f"{split}: {len(dataset.paths)} paths for {count} images")
        expect(len({dataset.key(index) for index in range(count)}) == count, f"{split}: two images have the same key")
        for name, mask in (("query", dataset.query), ("gallery", dataset.gallery)):
            fits = mask is None or (mask.dtype == torch.bool and mask.shape == (count,))
            expect(fits, f"{split}: {name} is not bool of shape ({count},)")
        expect((dataset.query is None) == (dataset.gallery is None), f"{split}: query or gallery without the other")
        coarse = dataset.super_classes
        fits = coarse is None or (coarse.dtype == torch.int64 and coarse.shape == (classes,) and int(coarse.min()) >= 0)
        expect(fits, f"{split}: super_classes is not int64 of shape ({classes},), from 0")


def splits_share_no_class(config: DatasetConfig) -> None:
    """Check that training, validation and test share no class, and that split all contains all their images."""
    splits = splits_of(config)
    whole = splits.pop("all")
    for (one, first), (other, second) in combinations(splits.items(), 2):
        shared = sorted(set(first.class_names) & set(second.class_names))
        expect(not shared, f"{one} and {other} share {', '.join(shared[:3])}")
    known = {whole.key(index) for index in range(len(whole))}
    for split, dataset in splits.items():
        missing = [key for key in map(dataset.key, range(len(dataset))) if key not in known]
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


def building_again_gives_the_same(config: DatasetConfig) -> None:
    """Check that building a split again gives the same images, labels and names in the same order."""
    for split, dataset in splits_of(config).items():
        again = config.build(split)
        expect(torch.equal(again.labels, dataset.labels), f"{split}: labels differ")
        expect(again.class_names == dataset.class_names, f"{split}: class names differ")
        keys = [[one.key(index) for index in range(len(one))] for one in (dataset, again)]
        expect(keys[0] == keys[1], f"{split}: images or their order differ")
        expect(torch.equal(again.sample(0), dataset.sample(0)), f"{split}: sample 0 differs")


def other_processes_can_have_it(config: DatasetConfig) -> None:
    """Check that sending the dataset to worker processes changes neither the copy nor the original.

    macOS and Windows start new processes for workers, and tensors then move to shared memory.
    """
    for split, dataset in splits_of(config).items():
        rows = range(len(dataset))
        before = [dataset.paths[row] for row in rows], [dataset.key(row) for row in rows]
        for where, one in (
            ("in the worker", pickle.loads(ForkingPickler.dumps(dataset))),
            ("in the main process", dataset),
        ):
            after = [one.paths[row] for row in rows], [one.key(row) for row in rows]
            expect(after == before, f"{split}: paths or keys differ {where} after sending")
            expect(torch.equal(one.labels, dataset.labels), f"{split}: labels differ {where}")
            expect(torch.equal(one.sample(0), dataset.sample(0)), f"{split}: sample 0 differs {where}")


DATASET: tuple[Promise, ...] = (
    labels_names_and_paths_fit_together,
    splits_share_no_class,
    samples_are_of_one_kind_and_stay_the_same,
    building_again_gives_the_same,
    other_processes_can_have_it,
    a_line_of_help_says_what_it_is,
)
