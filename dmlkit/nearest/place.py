"""Evidence of places and times that two images show the same individual."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

EARTH = 6371.0088  # mean radius in km
SURE = 0.99  # probability that an individual is in its home range at the same time


class Sightings(NamedTuple):
    """Where and when images were taken."""

    places: Tensor
    """(N, 3) float64, unit vectors from the center of the Earth; nan where the place or the time is not known."""
    days: Tensor
    """(N,) float64, times in days."""

    @classmethod
    def at(cls, latitude: Tensor, longitude: Tensor, days: Tensor) -> "Sightings":
        """Return the sightings at degrees (N,) of latitude and longitude, all float64.

        Example:
            >>> degrees = torch.tensor([0.0, 0.0], dtype=torch.float64), torch.tensor([0.0, 1.0], dtype=torch.float64)
            >>> two = Sightings.at(*degrees, torch.zeros(2))
            >>> kilometers(two.places[0], two.places[1]).item().__round__(1)
            111.2
        """
        north, east = latitude.deg2rad(), longitude.deg2rad()
        return cls(torch.stack([north.cos() * east.cos(), north.cos() * east.sin(), north.sin()], dim=-1), days)

    def chosen(self, rows: Tensor) -> "Sightings":
        """Return some of the sightings, by rows or (N,) bool."""
        return Sightings(self.places[rows], self.days[rows])


def kilometers(first: Tensor, second: Tensor) -> Tensor:
    """Return the distances (...) on a sphere of the Earth's mean radius, of unit vectors (..., 3), broadcast."""
    return 2 * EARTH * ((first - second).square().sum(-1).sqrt() / 2).clamp(max=1).asin()


class Range(NamedTuple):
    r"""How far apart sightings of one individual are, and of different ones.

    The evidence of two sightings at distance d and t days apart is the logarithm of a ratio of likelihoods, that of one
    individual by that of two:

    .. math:: \log \left( 1 - a + a \frac{R^2}{r^2} e^{-d^2 / (2 r^2) + d^2 / (2 R^2)} \right), \quad
              a = 0.99 e^{-t / \tau}.

    The half-normal :math:`e^{-d^2 / (2 r^2)}` has the form of a detection function of spatial capture-recapture, in
    which d is the distance of a trap from the center of a home range (Efford 2004, Oikos 106, 598-610; function 0 of
    the R package secr). With time, or in 1 of 100 cases, an individual may be anywhere: the evidence decays to 0, and
    is at least log 0.01. It is 0 where a place or time is not known.
    """

    kilometers: float
    """r, standard deviation of the distance of two sightings of one individual, in each direction."""
    spread: float
    """R, the same for different individuals; at least r."""
    days: float
    """tau, time after which the evidence has decayed to 1 / e; infinite: it does not decay."""

    def evidence(self, first: Sightings, second: Sightings) -> Tensor:
        """Return the evidence (...) of sightings, broadcast, float64, in nats.

        Example:
            >>> there = Sightings.at(*torch.zeros(2, 1, dtype=torch.float64), torch.zeros(1))
            >>> Range(1.0, 10.0, days=float("inf")).evidence(there, there).round(decimals=3)  # log(0.01 + 0.99 * 100)
            tensor([4.5950], dtype=torch.float64)
        """
        squares = kilometers(first.places, second.places).square()
        ratio = (self.spread / self.kilometers) ** 2 * (squares * (self.spread**-2 - self.kilometers**-2) / 2).exp()
        sure = SURE * ((first.days - second.days).abs() / -self.days).exp()
        return torch.log1p(sure * (ratio - 1)).nan_to_num(nan=0.0)


def evidence_of(sightings: Sightings, span: Range) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the scores of a `dmlkit.nearest.rescore.Rescorer`: the evidence of sightings, given by their rows."""

    def scores(queries: Tensor, items: Tensor) -> Tensor:
        found = torch.empty(items.shape, dtype=torch.float64)
        for row, query in enumerate(queries[:, None]):  # at once they would take three times the memory of the scores
            found[row] = span.evidence(sightings.chosen(query), sightings.chosen(items[row]))
        return found

    return scores
