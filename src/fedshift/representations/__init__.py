"""Representations in clients' and server's models: similarity of feature maps, and BatchNorm statistics.

FedWon (Zhuang & Lyu 2024, arXiv:2306.05879), section 4.2 and figures 5, 12, 13. The paper does not specify its models,
images and pairs; the choices made here are documented in ``comparison``.
"""

from .comparison import RepresentationComparison as RepresentationComparison
from .comparison import Similarity as Similarity
from .comparison import collect_comparison as collect_comparison
from .comparison import compare_representations as compare_representations
