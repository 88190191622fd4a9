"""Batches of classes: n images of each of m classes, also in two draws, or from a few super-classes."""

from collections import Counter, deque
from math import prod
from typing import Literal

import numpy as np
from pydantic import PositiveInt

from dmlkit.errors import OptionError
from dmlkit.samplers.base import Sampler, pairs_among


class ClassBalanced(Sampler, name="class_balanced"):
    """m classes x n images in every batch, as pair losses need.

    Over an epoch, all classes are drawn equally often, give or take one, and so are all images of a class: classes and
    images are dealt from shuffled decks that are reshuffled when they run out. Only a class with fewer than n images
    repeats one within a batch. An epoch has about as many images as the training set.

    If images have several labels, m labels are drawn, each with n images that have it, none of which is in the batch
    already, unless the label has too few.

    Raises:
        UserError: there are fewer than m classes, a class has fewer than n groups, or images have several labels and
            ``apart`` is set.

    Example:
        >>> import torch
        >>> sampler = ClassBalanced(torch.tensor([0, 0, 1, 1, 2, 2]), 0, classes_per_batch=3, images_per_class=2)
        >>> sorted(sampler.batches(epoch=0)[0])
        [0, 1, 2, 3, 4, 5]
    """

    takes_several_labels = True
    classes_per_batch: PositiveInt = 8
    """m, number of classes in a batch."""
    images_per_class: PositiveInt = 4
    """n, images per class in a batch."""
    apart: Literal["group"] | None = None
    """Take the n images from n different groups (column ``group`` of the table: camera, burst, video), so that no two
    images of a class in a batch share a group; null ignores groups."""

    @property
    def pairs(self) -> str:
        return pairs_among(self.classes_per_batch, self.images_per_class)

    def __post_init__(self) -> None:
        if self.apart and self.groups is None:
            raise OptionError("sampler.apart", "the dataset has no groups; use a table with a column group, or null")
        if self.apart and self.members is not None:  # those drawn for two labels may share both a group and a label
            raise OptionError("sampler.apart", "needs one label per image, got several; remove this key")
        self.images = group_by(self.labels.numpy())  # the images of each class
        if self.members is not None:  # of each label
            self.images = [of_label.nonzero()[0] for of_label in self.members[self.labels].numpy().T]
        if len(self.images) < self.classes_per_batch:
            raise OptionError(
                "sampler.classes_per_batch",
                f"expected at most the {len(self.images)} training classes, got {self.classes_per_batch}; "
                "reduce it or add classes",
            )
        self.batch_size = self.classes_per_batch * self.images_per_class
        self.piles = self._piles(self.groups.numpy()) if self.apart and self.groups is not None else None

    def batches(self, epoch: int) -> list[list[int]]:
        generator = self.generator(epoch)
        classes = Deck(np.arange(len(self.images)), generator)
        if self.piles is None:
            decks = [Deck(images, generator) for images in self.images]
        else:
            decks = [Piles(piles, generator) for piles in self.piles]
        return [self._batch(self.classes_of_batch(classes), decks) for _ in range(len(self))]

    def _batch(self, classes: list[int], decks: "list[Deck] | list[Piles]") -> list[int]:
        """Return images of classes; with several labels, one that is in the batch already is dealt again."""
        batch: list[int] = []
        for label in classes:
            for card in decks[label].deal(self.images_per_class):
                # the rest of the deck's round and a whole one, so that every image of the label is dealt
                index, tries = card, 0 if self.members is None else 2 * len(self.images[label])
                while tries and index in batch:
                    index, tries = decks[label].deal(1)[0], tries - 1
                batch.append(index)
        return batch

    def classes_of_batch(self, classes: "Deck") -> list[int]:
        """Return the m classes of the next batch."""
        return classes.deal(self.classes_per_batch)

    def _piles(self, groups: np.ndarray) -> list[list[np.ndarray]]:
        """Return the images of each class, separated by group."""
        piles = [[images[positions] for positions in group_by(groups[images])] for images in self.images]
        few = sum(len(of_class) < self.images_per_class for of_class in piles)
        if few:
            raise OptionError(
                "sampler.apart",
                f"{few} of {len(piles)} training classes have images from fewer than "
                f"{self.images_per_class} groups; reduce sampler.images_per_class or remove these classes",
            )
        return piles


class Paired(Sampler, name="paired"):
    """Two draws of the same m classes with n images each, for graph consistency: 2 x m x n images per batch.

    Chen et al., AAAI 2021 (CGML): the first half of a batch is X', the second X'', with the same class order.

    Position i of both halves has the same class. The 2n images of a class are dealt from one shuffled deck, so
    the two draws share an image only if a class has fewer than 2n. Repetitions of an image are then adjacent; so at
    most one image is in both draws, and none is paired with itself: with 5 images per class and n = 10, a fifth of the
    pairs would otherwise be an image and itself, which are consistent for any graph.

    Raises:
        UserError: there are fewer than m classes.

    Example:
        >>> import torch
        >>> labels = torch.arange(12) // 4
        >>> batch = Paired(labels, seed=0, classes_per_batch=2, images_per_class=2).batches(epoch=0)[0]
        >>> first, second = labels[batch].chunk(2)
        >>> torch.equal(first, second), len(set(batch))
        (True, 8)
    """

    classes_per_batch: PositiveInt = 13
    """m, number of classes in a batch."""
    images_per_class: PositiveInt = 10
    """n, images per class in each of the two draws."""

    @property
    def pairs(self) -> str:
        return pairs_among(self.classes_per_batch, 2 * self.images_per_class)

    def __post_init__(self) -> None:
        images = 2 * self.images_per_class
        self.both = ClassBalanced(
            self.labels, self.seed, classes_per_batch=self.classes_per_batch, images_per_class=images
        )
        self.batch_size = self.both.batch_size

    def batches(self, epoch: int) -> list[list[int]]:
        return [self._deal(batch) for batch in self.both.batches(epoch)]

    def _deal(self, batch: list[int]) -> list[int]:
        n = self.images_per_class
        of_classes = [batch[start : start + 2 * n] for start in range(0, len(batch), 2 * n)]
        batch = [image for hand in of_classes for image in sorted(hand, key=hand.index)]  # unchanged without repeats
        hands = [batch[start : start + n] for start in range(0, len(batch), n)]  # alternately X' and X'' of each class
        return [index for half in (hands[::2], hands[1::2]) for hand in half for index in hand]


class Hierarchical(Sampler, name="hierarchical"):
    """s super-classes x m of their classes x n images; for datasets with super-classes (sop, inshop, table) or levels.

    Super-classes, the classes of a super-class and the images of a class are dealt from shuffled decks, so any two of
    them are drawn equally often over an epoch, give or take one hand. Classes of a small super-class are drawn more
    often than those of a large one. An epoch has about as many images as the training set.

    Raises:
        UserError: there are fewer than s super-classes, or one of them has fewer than m classes.

    Example:
        >>> import torch
        >>> labels, super_classes = torch.arange(16) // 2, torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
        >>> sampler = Hierarchical(labels, 0, super_classes, super_classes_per_batch=1, classes_per_super_class=4,
        ...                        images_per_class=2)
        >>> sorted(labels[sampler.batches(epoch=0)[0]].unique().tolist()) in ([0, 1, 2, 3], [4, 5, 6, 7])
        True
    """

    super_classes_per_batch: PositiveInt = 2
    """s, super-classes in a batch."""
    classes_per_super_class: PositiveInt = 8
    """m, classes per super-class in a batch."""
    images_per_class: PositiveInt = 4
    """n, images per class in a batch."""
    level: str | None = None
    """Level of the dataset's hierarchy whose classes are the super-classes; null for the one above the classes."""

    @property
    def pairs(self) -> str:
        return pairs_among(self.super_classes_per_batch * self.classes_per_super_class, self.images_per_class)

    def __post_init__(self) -> None:
        if self.super_classes is None:
            raise OptionError(
                "sampler",
                "hierarchical needs a dataset with super-classes; use sop, inshop, a table, or dataset.levels",
            )
        self.images = group_by(self.labels.numpy())
        self.classes = group_by(self.super_classes.numpy())
        if len(self.classes) < self.super_classes_per_batch:
            raise OptionError(
                "sampler.super_classes_per_batch",
                f"expected at most the {len(self.classes)} super-classes of the dataset, got "
                f"{self.super_classes_per_batch}; reduce it",
            )
        smallest = min(len(classes) for classes in self.classes)
        if smallest < self.classes_per_super_class:
            raise OptionError(
                "sampler.classes_per_super_class",
                f"expected at most the {smallest} classes "
                f"of the smallest super-class, got {self.classes_per_super_class}; reduce it",
            )
        self.counts = self.super_classes_per_batch, self.classes_per_super_class, self.images_per_class
        self.batch_size = prod(self.counts)

    def batches(self, epoch: int) -> list[list[int]]:
        generator = self.generator(epoch)
        super_classes, classes_each, images_each = self.counts
        top = Deck(np.arange(len(self.classes)), generator)
        middle = [Deck(classes, generator) for classes in self.classes]
        bottom = [Deck(images, generator) for images in self.images]
        return [
            [
                index
                for super_class in top.deal(super_classes)
                for label in middle[super_class].deal(classes_each)
                for index in bottom[label].deal(images_each)
            ]
            for _ in range(len(self))
        ]


class Deck:
    """Deals cards in shuffled order; a hand of k contains no card more than ceil(k / n) times."""

    def __init__(self, cards: np.ndarray, generator: np.random.Generator) -> None:
        self.cards, self.generator = cards, generator
        self.rest: deque[int] = deque()

    def deal(self, count: int) -> list[int]:
        """Return a hand of ``count`` cards."""
        hand: list[int] = []
        while len(hand) < count:
            if not self.rest:
                # cards of this hand go to the end of the new round, those dealt most often last
                shuffled = self.generator.permutation(self.cards).tolist()
                self.rest.extend(sorted(shuffled, key=Counter(hand).__getitem__))
            hand.append(self.rest.popleft())
        return hand


class Piles:
    """Deals from several decks in turn; a hand no larger than the number of piles has no two cards from one pile."""

    def __init__(self, piles: list[np.ndarray], generator: np.random.Generator) -> None:
        self.piles = [Deck(cards, generator) for cards in piles]
        self.turns = Deck(np.arange(len(piles)), generator)

    def deal(self, count: int) -> list[int]:
        """Return a hand of ``count`` cards."""
        return [card for pile in self.turns.deal(count) for card in self.piles[pile].deal(1)]


def group_by(values: np.ndarray) -> list[np.ndarray]:
    """Return the positions of each distinct value, in the order of the values."""
    order = np.argsort(values, kind="stable")
    _, starts = np.unique(values[order], return_index=True)
    return np.split(order, starts[1:])
