"""Losses: ``loss(embeddings, labels)`` returns a scalar tensor. A file holds one loss, or two of one story."""

from typing import TYPE_CHECKING

from dmlkit.component import import_on_demand

if TYPE_CHECKING:
    from dmlkit.losses.arcface import ArcFace
    from dmlkit.losses.base import Loss, LossConfig
    from dmlkit.losses.binomial_deviance import BinomialDeviance
    from dmlkit.losses.circle import Circle
    from dmlkit.losses.contrastive import Contrastive, SNRContrastive
    from dmlkit.losses.cosface import CosFace
    from dmlkit.losses.cross_batch_memory import CrossBatchMemory
    from dmlkit.losses.fast_ap import FastAP
    from dmlkit.losses.grouplet import Grouplet
    from dmlkit.losses.lifted_structure import LiftedStructure
    from dmlkit.losses.margin import Margin
    from dmlkit.losses.mpa import MPA
    from dmlkit.losses.multi_similarity import MultiSimilarity
    from dmlkit.losses.n_pair import NPair
    from dmlkit.losses.norm_softmax import NormSoftmax
    from dmlkit.losses.pairwise_cross_entropy import PairwiseCrossEntropy
    from dmlkit.losses.proxy_anchor import ProxyAnchor
    from dmlkit.losses.proxy_gml import ProxyGML
    from dmlkit.losses.proxy_isa import ProxyISA
    from dmlkit.losses.proxy_nca import ProxyNCA
    from dmlkit.losses.recall_surrogate import RecallSurrogate
    from dmlkit.losses.roadmap import ROADMAP
    from dmlkit.losses.several_spaces import Matryoshka, PerFactor
    from dmlkit.losses.sigmoid_pairs import SigmoidPairs
    from dmlkit.losses.smooth_ap import SmoothAP
    from dmlkit.losses.soft_triple import SoftTriple
    from dmlkit.losses.sum import Sum
    from dmlkit.losses.sup_con import SupCon
    from dmlkit.losses.triplet import Triplet

__all__ = [
    "MPA",
    "ROADMAP",
    "ArcFace",
    "BinomialDeviance",
    "Circle",
    "Contrastive",
    "CosFace",
    "CrossBatchMemory",
    "FastAP",
    "Grouplet",
    "LiftedStructure",
    "Loss",
    "LossConfig",
    "Margin",
    "Matryoshka",
    "MultiSimilarity",
    "NPair",
    "NormSoftmax",
    "PairwiseCrossEntropy",
    "PerFactor",
    "ProxyAnchor",
    "ProxyGML",
    "ProxyISA",
    "ProxyNCA",
    "RecallSurrogate",
    "SNRContrastive",
    "SigmoidPairs",
    "SmoothAP",
    "SoftTriple",
    "Sum",
    "SupCon",
    "Triplet",
]

import_on_demand(__name__)
