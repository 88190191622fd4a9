"""Heads, which map features to points on the manifold; one per module."""

from dmlkit.component import load_family
from dmlkit.heads.base import Head, HeadConfig
from dmlkit.heads.hyperbolic import LorentzLinear, MobiusLinear
from dmlkit.heads.linear import Linear

__all__ = [
    "Head",
    "HeadConfig",
    "Linear",
    "LorentzLinear",
    "MobiusLinear",
]

load_family(__name__)
