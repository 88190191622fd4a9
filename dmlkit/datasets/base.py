"""Interface of the datasets: labeled samples of one split, with validation classes taken from the training classes."""

from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

import numpy as np
from pydantic import AfterValidator, Discriminator, Field, PrivateAttr, Tag, ValidationInfo, model_validator

from dmlkit.component import ComponentConfig
from dmlkit.datasets.files.archives import Published
from dmlkit.datasets.files.class_names import (
    SplitClasses,
    cut_between_groups,
    path_levels,
    several_labels,
    sharing_labels,
)
from dmlkit.datasets.files.dataset import Dataset, class_subset, with_classes
from dmlkit.datasets.files.listing import LISTED_SPLITS, NO_QUERIES, ListedSplit, Listing
from dmlkit.errors import OptionError, UserError, counted, option_errors, some_of, warn_once
from dmlkit.files.image_file import MAX_PIXELS
from dmlkit.files.paths import DATA_CHECK, raise_faults
from dmlkit.files.where import Where

Split = Literal["train", "validation", "test", "all"]
SPLITS: tuple[Split, ...] = LISTED_SPLITS
FOLDS = 4
SHARE = 0.8  # of the images of a known class that are trained on, by default


def _two_different(levels: tuple[str, ...]) -> tuple[str, ...]:
    if len(levels) == 1 or len(set(levels)) < len(levels):
        raise ValueError(f"expected at least two different names, coarsest first, got {', '.join(levels)}")
    return levels


LevelNames = Annotated[tuple[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")], ...], AfterValidator(_two_different)]


Division = Annotated[
    Annotated[Literal["official", "halves", "reality_check", "all", "images"], Tag("<name>")]
    | Annotated[dict[Literal["time"], Annotated[float, Field(gt=0, lt=1)]], Field(min_length=1), Tag("<time>")],
    Discriminator(lambda value: "<time>" if isinstance(value, dict) else "<name>"),
]


class DatasetConfig(ComponentConfig, frozen=True):
    """Root of the dataset family."""

    published: ClassVar[Published | None] = None
    """Archives and counts of the literature, if the dataset is a benchmark."""
    sample: ClassVar[str] = "image"
    """Name of the kind of the samples, see `dmlkit.datasets.files.samples`."""
    own_levels: ClassVar[tuple[str, ...] | None] = ()
    """Names of the levels of classes that are not paths; None if the files decide."""
    titled_by: ClassVar[str | None] = None
    """Key that says which data these are, such as ``root``; None if the name of the dataset does."""

    split: Division = "official"
    """``official`` uses the dataset's own split; ``halves`` tests on the last half of the classes instead;
    ``reality_check`` too, and validates on a fold of the first half; ``all`` trains on every class and leaves none to
    measure the model on, see ``dmlkit final``. Two are for known classes, whose test images search the training images:
    ``images`` is the dataset's own split of images, or else tests on the last fifth of each class; ``{time: 0.8}``
    tests on the last fifth by time."""
    fold: Annotated[int, Field(ge=0, lt=FOLDS)] = 0
    """Number of the validation fold, with ``split: reality_check``."""
    validation_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of the training classes to hold out for choosing the best checkpoint: the last ones, at least two. Where
    test images are of known classes, share of the training images."""
    on_bad_image: Literal["error", "skip"] = "error"
    """What to do with an unreadable image: ``error`` stops the command, ``skip`` excludes the image and lists it in the
    summary."""
    max_pixels: Annotated[int, Field(ge=1)] = MAX_PIXELS
    """Largest number of pixels of an image, width x height; decoding takes up to 18 bytes for each. A JPEG of more is
    decoded at 1/2, 1/4 or 1/8 of its width and height, unless it has a box; another image of more is unreadable."""
    levels: LevelNames = ()
    """Names of the levels of a hierarchy, coarsest first, e.g. ``[genus, species]``: the name of each class is then a
    path with one part per level, ``corvus/corax``. Empty: class names are not paths."""
    new_classes: Literal["ignore", "test"] = "ignore"
    """What commands on a trained run do with classes that its data have gained since: ``ignore`` leaves them out of the
    run's splits and reports their number, ``test`` adds them to its test classes."""
    group: Literal["day"] | None = None
    """``day`` makes the images of each class of one day a group, instead of the column ``group``, by the column
    ``time`` or else by the EXIF data of the files; null keeps the groups of the dataset."""

    _of_run: SplitClasses | None = PrivateAttr(None)

    @property
    def data_root(self) -> Path | None:
        """The folder all of which is its data: nothing else may be written there. None where a table names files."""
        root = getattr(self, "root", None)
        return None if root is None else Path(root)

    @property
    def title(self) -> str:
        """What people call the data: the place of a user's own, the name of others."""
        return self.name if self.titled_by is None else str(getattr(self, self.titled_by))

    @property
    def label_separator(self) -> str | None:
        """Separator of several labels of an image; None if each image has one label."""
        return getattr(self, "separator", None)

    def require_one_label(self, what: str) -> None:
        """Raise a `UserError` that names ``what`` compares labels, if images have several."""
        if self.label_separator is not None:
            raise UserError(several_labels(what, self.label_separator))

    @property
    def own_splits(self) -> tuple[Split, ...]:
        """The splits that have classes of their own."""
        if self._of_run is not None:
            return tuple(split for split in SPLITS if self._of_run.names[split])
        if self.split == "all":
            return ("train",)
        validates = self.split == "reality_check" or self.validation_fraction > 0
        return ("train", "validation", "test") if validates else ("train", "test")

    @property
    def validates(self) -> bool:
        """Whether the dataset has validation classes, which are not trained on."""
        return "validation" in self.own_splits and not self.tests_known

    @property
    def tests_known(self) -> bool:
        """Whether validation and test images are of classes that are trained on: a closed set."""
        return self.split == "images" or isinstance(self.split, dict)

    @property
    def split_text(self) -> str:
        """The option ``split`` as recipes have it."""
        return self.split if isinstance(self.split, str) else f"{{time: {self.split['time']:g}}}"

    def require_unseen(self, what: str) -> None:
        """Raise a `UserError` that names ``what`` needs validation classes, if every class is trained on."""
        if self.tests_known:
            raise UserError(
                f"{what}: needs classes that the model has not seen, but dataset.split {self.split_text} trains on "
                "every class; create a gallery of the training images (dmlkit gallery create), and calibrate that"
            )

    @property
    def default_split(self) -> Split:
        """The split to embed and search by default: test, or all images if every class is trained on."""
        return "test" if "test" in self.own_splits else "all"

    @property
    def classes_of_run(self) -> SplitClasses | None:
        """The classes of each split of the run that the dataset belongs to; None outside of a run."""
        return self._of_run

    def of_run(self, classes: SplitClasses | None) -> Self:
        """Return the dataset of a run: the images of its splits are those of the run's classes, by their names."""
        dataset = self.model_copy()
        dataset._of_run = classes  # pyright: ignore[reportAttributeAccessIssue] - private, although the model is frozen
        return dataset

    def limited(self, where: Where) -> Self:
        """Return the dataset of the rows of its table that fulfill these conditions too; raise if it is no table."""
        raise UserError(
            f"--where {where.text}: the dataset is {self.title}, which has no columns; create a gallery from a table "
            "with this column, or remove this option"
        )

    def build(self, split: Split) -> Dataset:
        """Return the samples of a split; validation classes come from the training classes, never from test."""
        return self.images_of(self._listed_with_notes(), split)

    def searched(self, split: Split) -> Dataset:
        """Return the samples by which a split is scored: as `build`; of known classes also the gallery to search in."""
        return self.searched_of(self._listed_with_notes(), split)

    def _listed_with_notes(self) -> Listing | None:
        listing = self.listed()
        if listing is not None:
            listing.warn_of_notes()
        return listing

    def images_of(self, listing: Listing | None, split: Split) -> Dataset:
        """Return the samples of a split from a listing, see `build`; it is None for a dataset without files."""
        if self.tests_known and split != "all":
            images = self._known(listing, split).part(split)
            if self._of_run and split == "train":  # in the order of the proxies
                images = with_classes(images, self._of_run.names["train"])
        elif self._of_run is None or split == "all":
            images = self._divided(listing, split)
        else:
            images = self._recorded(self._of_run, listing, split)
        return self._with_levels(images)

    def searched_of(self, listing: Listing | None, split: Split) -> Dataset:
        """Return the samples by which a split is scored from a listing, see `searched`."""
        if self.tests_known and split in ("validation", "test"):
            return self._with_levels(self._known(listing, split).searched(split))
        return self.images_of(listing, split)

    def _with_levels(self, images: Dataset) -> Dataset:
        if self.levels:
            if images.levels:
                raise OptionError("dataset.levels", f"{self.name} has super-classes of its own; remove this key")
            with option_errors("dataset.levels"):
                images.levels = path_levels(images.class_names, self.levels)
        images.limit(self.max_pixels)
        return images

    def _known(self, listing: Listing | None, split: ListedSplit) -> Listing:
        """Return the listing with the splits of images of known classes; those of a run by their names."""
        if listing is None:
            raise OptionError("dataset.split", f"{self.split_text}: {self.name} has no files to divide; use official")
        raise_faults(listing.faults, DATA_CHECK)
        if self._of_run is None:
            listing = self._with_validation(listing)
        else:
            self._require(self._of_run, split)
            listing = self._recorded_images(self._of_run, listing)
        if split == "validation" and not len(listing.rows_of(split)):
            raise OptionError("dataset.validation_fraction", "0.0 holds out no images for validation")
        return listing

    def _recorded_images(self, of_run: SplitClasses, listing: Listing) -> Listing:
        """Return the listing with the splits that a run has; other images are left out and counted.

        Data with none of the run's images are other data, which are divided by their own rule.
        """
        recorded, keys = of_run.images or {}, listing.keys()
        index_of = {key: index for index, split in enumerate(LISTED_SPLITS) for key in recorded.get(split, ())}
        if index_of.keys().isdisjoint(keys):
            warn_once(f"{self.title}: has none of the images of {of_run.run}, and is divided by its own rule")
            return self._with_validation(self._divided_by_images(listing))
        splits = np.array([index_of.get(key, -1) for key in keys], dtype=np.int8)
        if lost := index_of.keys() - {*keys}:
            of = f"{len(lost)} of the {len(index_of)} {self.sample}s of {of_run.run}"
            warn_once(f"{self.title}: lacks {of}: {some_of(sorted(lost))}")
        if others := [keys[row] for row in np.flatnonzero((splits < 0) & (listing.labels >= 0)).tolist()]:
            are = counted(len(others), f"{self.sample} is", f"{self.sample}s are")
            why = ", new or without a time" if isinstance(self.split, dict) else ", new since"
            warn_once(f"{self.title}: {are} in no split of {of_run.run}{why}, and left out: {some_of(others)}")
        return replace(listing, splits=splits)

    def _require(self, of_run: SplitClasses, split: Split) -> None:
        """Raise an error unless a run has classes of a split, and tests known classes if the dataset does."""
        of_run.require(split)
        if self.tests_known != (of_run.images is not None) and self.split != "all":
            kind = "unseen classes" if self.tests_known else "known classes"
            raise OptionError(
                "dataset.split", f"got {self.split_text}, but {of_run.run} was trained to test {kind}; keep that"
            )

    def _with_validation(self, listing: Listing) -> Listing:
        return listing.with_validation_images(self.validation_fraction, by_time=isinstance(self.split, dict))

    def known_images(self) -> dict[str, tuple[str, ...]] | None:
        """Return the names of the images of each split for a run to keep to, if test images are of known classes."""
        if not self.tests_known or (listing := self.listed()) is None:
            return None
        listing, keys = self._known(listing, "train"), np.array(listing.keys(), dtype=object)
        return {split: tuple(keys[listing.rows_of(split)]) for split in LISTED_SPLITS}

    def _divided(self, listing: Listing | None, split: Split) -> Dataset:
        """Return the samples of a split by the rule of the dataset."""
        if self.split == "all" and split != "all":
            if split != "train":
                reason = f"all leaves no {split} classes; use official, which divides the classes"
                raise OptionError("dataset.split", reason)
            split = "all"
        if self.split != "reality_check" or split == "all":
            return self._official(listing, split)
        whole = self.load("all") if listing is None else listing.images("all")
        if whole.query is not None:
            raise OptionError("dataset.split", f"reality_check {NO_QUERIES}")
        return class_subset(whole, class_fold(len(whole.class_names), self.fold)[split])

    def _recorded(self, of_run: SplitClasses, listing: Listing | None, split: Split) -> Dataset:
        """Return the samples of the classes that a run has in a split; report classes that the data gained or lost.

        Data with none of the run's classes are other data, which are divided by their own rule.
        """
        self._require(of_run, split)
        if listing is None and (images := self._divided(None, split)).class_names == tuple(of_run.names[split]):
            return images  # samples that are rendered gain no classes
        whole = self.load("all") if listing is None else listing.images("all")
        known = {name for names in of_run.names.values() for name in names}
        new = [name for name in whole.class_names if name not in known]
        if len(new) == len(whole.class_names):
            warn_once(f"{self.title}: has none of the classes of {of_run.run}, and is divided by its own rule")
            return self._divided(listing, split)
        wanted = [*of_run.names[split], *self._gained(of_run, new, split)]
        present = {*whole.class_names}.intersection(wanted)
        if lost := [name for name in wanted if name not in present]:
            kind = "training" if split == "train" else split
            of = f"{len(lost)} of the {len(wanted)} {kind} classes of {of_run.run}"
            text = f"{self.title}: lacks {of}: {some_of(lost)}"
            if len(lost) == len(wanted):
                raise UserError(f"{text}; restore their {self.sample}s")
            warn_once(text)
        if listing is None:
            return with_classes(whole, wanted)
        labels = [label for label, name in enumerate(listing.class_names) if name in present]
        images = listing.pick(np.isin(listing.labels, labels).nonzero()[0])
        return with_classes(images, wanted) if split == "train" else images  # in the order of the proxies

    def _gained(self, of_run: SplitClasses, new: list[str], split: Split) -> list[str]:
        """Return which classes that a run does not know are added to one of its splits, and report them.

        With several labels per image, a set with a label that the run was trained or chosen on is not unseen.
        """
        if self.new_classes == "ignore":
            if new:
                classes = counted(len(new), "class is", "classes are")
                way = "; dataset.new_classes=test adds them to the test classes" if of_run.names["test"] else ""
                since = f"new since {of_run.run} was trained on it, and left out"
                warn_once(f"{self.title}: {classes} {since}: {some_of(new)}{way}")
            return []
        if split != "test":
            return []
        if self.label_separator is not None:
            seen = {*of_run.names["train"], *of_run.names["validation"]}
            known = {*sharing_labels(new, seen, self.label_separator)}
            new = [name for name in new if name not in known]
        if new:
            classes = counted(len(new), "new class is", "new classes are")
            warn_once(f"{self.title}: {classes} added to the test classes of {of_run.run}: {some_of(new)}")
        return new

    def _official(self, listing: Listing | None, split: Split) -> Dataset:
        load = self.load if listing is None else listing.images
        if split in ("test", "all"):
            return load(split)
        if listing is not None and len(listing.rows_of("validation")):
            return listing.images(split)  # the dataset has its own validation split
        whole = load("train")
        count = len(whole.class_names)
        # with a single class every search would succeed, whatever the model does
        held_out = max(2, ceil(count * self.validation_fraction)) if self.validation_fraction else 0
        # calibrating needs no training classes, but sets of labels are cut between two groups; a single class can be
        # embedded, and is refused where training starts
        least = int(split == "train" or self.label_separator is not None)
        if count - held_out < least or (split == "validation" and not held_out):
            raise OptionError(
                "dataset.validation_fraction",
                f"{self.validation_fraction} of {count} training classes leaves "
                f"{max(0, count - held_out)} for training and {held_out} for validation; expected at least two for "
                "training and two for validation; change the fraction, or use 0 for no validation",
            )
        if self.label_separator is not None and held_out:
            cut = cut_between_groups(whole.class_names, self.label_separator, count - held_out, (1, count - 2))
            if cut is None:
                raise OptionError(
                    "dataset.validation_fraction",
                    "common labels connect all training images, so none can be held out for validation; expected at "
                    "least two groups of images without a common label; use 0 for no validation",
                )
            held_out = count - cut
        classes = range(count - held_out) if split == "train" else range(count - held_out, count)
        return class_subset(whole, classes)

    def listed(self) -> Listing | None:
        """Return the listing of the dataset's files, with the split that the recipe asks for; see `listing`."""
        listing = self.listing()
        if self.group is not None:
            if listing is None:
                raise OptionError("dataset.group", f"{self.name} has no files, so it has no times; remove this key")
            listing = listing.grouped_by_day()
        if listing is not None and self.tests_known and self._of_run is None:
            return self._divided_by_images(listing)
        return listing.halved() if listing is not None and self.split == "halves" else listing

    def _divided_by_images(self, listing: Listing) -> Listing:
        share = self.split["time"] if isinstance(self.split, dict) else SHARE
        return listing.of_known_classes(share, by_time=isinstance(self.split, dict))

    @model_validator(mode="after")
    def _options_of_the_split(self, info: ValidationInfo) -> Self:
        is_trained = (info.context or {}).get("is_trained", False)  # a run of a fold is evaluated on other splits too
        if self.fold and self.split != "reality_check" and not is_trained:
            raise ValueError(f"fold {self.fold} needs split reality_check, got {self.split_text}; remove one of them")
        if self.tests_known and self.new_classes == "test":
            raise ValueError(
                f"split {self.split_text} tests known classes, so new_classes cannot be test; remove one of them"
            )
        return self

    @classmethod
    def lacks(cls) -> list[str]:
        """Return `load` where neither it nor `listing` is defined."""
        root = DatasetConfig
        return [*super().lacks(), *(["load"] if (cls.load, cls.listing) == (root.load, root.listing) else [])]

    def unlabeled(self, path: Path) -> Dataset:
        """Return the samples of a file without their labels, for ``dmlkit embed``, unless samples are images."""
        raise UserError(f"{path}: the model takes {self.sample}s, which are not read from files; use --split")

    def load(self, split: Literal["train", "test", "all"]) -> Dataset:
        """Return the samples of the official split; ``train`` still includes the classes held out for validation."""
        listing = self.listing()
        if listing is None:
            raise TypeError(f"{type(self).__name__}: listing() returned None, so the class must define load()")
        return listing.images(split)

    def listing(self) -> Listing | None:
        """Return the listing of the dataset's files, with all problems, before any image is opened.

        It is None for a dataset without files, which implements `load`.
        """
        return None


def class_fold(count: int, fold: int) -> dict[Literal["train", "validation", "test"], list[int]]:
    """Return the classes of a fold of the Reality Check protocol (Musgrave et al., ECCV 2020).

    The last half of the sorted classes is for testing. Of the n classes of the first half, floor(n / 4) contiguous ones
    are for validation: those before class floor(fold * n / 4), counted cyclically, so fold 0 has the last ones. If 4
    does not divide n, the remaining classes are never used for validation. There are 16 classes at least, since each
    fold needs two.

    Example:
        >>> folds = class_fold(200, fold=1)  # CUB-200-2011
        >>> [(len(fold), fold[0], fold[-1]) for fold in folds.values()]
        [(75, 25, 99), (25, 0, 24), (100, 100, 199)]
    """
    half, size = count // 2, count // 2 // FOLDS
    if size < 2:
        raise OptionError(
            "dataset.split", f"reality_check needs at least {4 * FOLDS} classes, got {count}; use split: official"
        )
    end = fold * half // FOLDS
    validation = {label % half for label in range(end - size, end)}
    return {
        "train": sorted({*range(half)} - validation),
        "validation": sorted(validation),
        "test": list(range(half, count)),
    }
