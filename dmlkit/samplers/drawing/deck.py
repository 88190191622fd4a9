"""Decks of cards: make draws uniform within an epoch and within a batch."""

from collections import Counter, deque

import numpy as np


class Deck:
    """Deals cards in shuffled order; a hand of k contains no card more than ceil(k / n) times.

    Args:
        cards: (n,) int64.
        generator: shuffles the cards whenever they run out.
    """

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
    """Deals from several decks in turn; a hand no larger than the number of piles has no two cards from one pile.

    Args:
        piles: the cards (n,) int64 of each pile.
        generator: shuffles the cards.
    """

    def __init__(self, piles: list[np.ndarray], generator: np.random.Generator) -> None:
        self.piles = [Deck(cards, generator) for cards in piles]
        self.turns = Deck(np.arange(len(piles)), generator)

    def deal(self, count: int) -> list[int]:
        """Return a hand of ``count`` cards."""
        return [card for pile in self.turns.deal(count) for card in self.piles[pile].deal(1)]


def group_by(values: np.ndarray) -> list[np.ndarray]:
    """Return the positions of each distinct value, in the order of the values.

    Example:
        >>> [group.tolist() for group in group_by(np.array([5, 3, 5]))]
        [[1], [0, 2]]
    """
    order = np.argsort(values, kind="stable")
    _, starts = np.unique(values[order], return_index=True)
    return np.split(order, starts[1:])
