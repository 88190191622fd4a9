"""Losses: ``loss(embeddings, labels)`` is a scalar tensor. Each file holds one loss and its configuration."""

from typing import TYPE_CHECKING

from dmlkit.component import load_family, missing_attribute
from dmlkit.losses.arcface import ArcFace, ArcFaceConfig
from dmlkit.losses.base import Loss, LossConfig
from dmlkit.losses.binomial_deviance import BinomialDeviance, BinomialDevianceConfig
from dmlkit.losses.circle import Circle, CircleConfig
from dmlkit.losses.contrastive import Contrastive, ContrastiveConfig
from dmlkit.losses.cosface import CosFace, CosFaceConfig
from dmlkit.losses.cross_batch_memory import CrossBatchMemory, CrossBatchMemoryConfig
from dmlkit.losses.grouplet import Grouplet, GroupletConfig
from dmlkit.losses.lifted_structure import LiftedStructure, LiftedStructureConfig
from dmlkit.losses.margin import Margin, MarginConfig
from dmlkit.losses.mpa import MPA, MPAConfig
from dmlkit.losses.multi_similarity import MultiSimilarity, MultiSimilarityConfig
from dmlkit.losses.n_pair import NPair, NPairConfig
from dmlkit.losses.norm_softmax import NormSoftmax, NormSoftmaxConfig
from dmlkit.losses.pairwise_cross_entropy import PairwiseCrossEntropy, PairwiseCrossEntropyConfig
from dmlkit.losses.proxy_anchor import ProxyAnchor, ProxyAnchorConfig
from dmlkit.losses.proxy_gml import ProxyGML, ProxyGMLConfig
from dmlkit.losses.proxy_isa import ProxyISA, ProxyISAConfig
from dmlkit.losses.proxy_nca import ProxyNCA, ProxyNCAConfig
from dmlkit.losses.soft_triple import SoftTriple, SoftTripleConfig
from dmlkit.losses.triplet import Triplet, TripletConfig

__all__ = [
    "MPA",
    "ArcFace",
    "ArcFaceConfig",
    "BinomialDeviance",
    "BinomialDevianceConfig",
    "Circle",
    "CircleConfig",
    "Contrastive",
    "ContrastiveConfig",
    "CosFace",
    "CosFaceConfig",
    "CrossBatchMemory",
    "CrossBatchMemoryConfig",
    "Grouplet",
    "GroupletConfig",
    "LiftedStructure",
    "LiftedStructureConfig",
    "Loss",
    "LossConfig",
    "MPAConfig",
    "Margin",
    "MarginConfig",
    "MultiSimilarity",
    "MultiSimilarityConfig",
    "NPair",
    "NPairConfig",
    "NormSoftmax",
    "NormSoftmaxConfig",
    "PairwiseCrossEntropy",
    "PairwiseCrossEntropyConfig",
    "ProxyAnchor",
    "ProxyAnchorConfig",
    "ProxyGML",
    "ProxyGMLConfig",
    "ProxyISA",
    "ProxyISAConfig",
    "ProxyNCA",
    "ProxyNCAConfig",
    "SoftTriple",
    "SoftTripleConfig",
    "Triplet",
    "TripletConfig",
]

load_family(__name__)

if not TYPE_CHECKING:  # otherwise every name would pass the type checker

    def __getattr__(name: str) -> object:
        raise missing_attribute(__name__, name)
