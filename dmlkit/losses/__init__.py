"""Losses: ``loss(embeddings, labels)`` returns a scalar tensor. Each file holds one loss, or a few of one kind."""

from dmlkit.component import load_family
from dmlkit.losses.base import Loss, LossConfig
from dmlkit.losses.circle import Circle
from dmlkit.losses.contrastive import Contrastive
from dmlkit.losses.cross_batch_memory import CrossBatchMemory
from dmlkit.losses.grouplet import Grouplet
from dmlkit.losses.lifted_structure import LiftedStructure
from dmlkit.losses.margin import Margin
from dmlkit.losses.matryoshka import Matryoshka
from dmlkit.losses.mpa import MPA
from dmlkit.losses.multi_similarity import MultiSimilarity
from dmlkit.losses.pair_logistic import BinomialDeviance, SigmoidPairs
from dmlkit.losses.pair_softmax import NPair, PairwiseCrossEntropy, SupCon
from dmlkit.losses.proxy_anchor import ProxyAnchor
from dmlkit.losses.proxy_gml import ProxyGML
from dmlkit.losses.proxy_isa import ProxyISA
from dmlkit.losses.proxy_nca import ProxyNCA
from dmlkit.losses.proxy_softmax import ArcFace, CosFace, NormSoftmax
from dmlkit.losses.ranks import ROADMAP, RecallSurrogate, SmoothAP
from dmlkit.losses.soft_triple import SoftTriple
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
    "ProxyAnchor",
    "ProxyGML",
    "ProxyISA",
    "ProxyNCA",
    "RecallSurrogate",
    "SigmoidPairs",
    "SmoothAP",
    "SoftTriple",
    "SupCon",
    "Triplet",
]

load_family(__name__)
