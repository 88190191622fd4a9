"""Heads, which map features to points on the manifold; one per module."""

from typing import TYPE_CHECKING

from dmlkit.component import load_family, missing_attribute
from dmlkit.heads.base import Head, HeadConfig
from dmlkit.heads.linear import Linear
from dmlkit.heads.lorentz_linear import LorentzLinear
from dmlkit.heads.mobius_linear import MobiusLinear

__all__ = [
    "Head",
    "HeadConfig",
    "Linear",
    "LorentzLinear",
    "MobiusLinear",
]

load_family(__name__)

if not TYPE_CHECKING:  # otherwise every name would pass the type checker

    def __getattr__(name: str) -> object:
        raise missing_attribute(__name__, name)
