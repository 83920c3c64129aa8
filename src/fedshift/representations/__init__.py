"""What clients' and the server's models see: how alike their feature maps are, and what their BatchNorm keeps.

FedWon (Zhuang & Lyu 2024, arXiv:2306.05879), section 4.2 and figures 5, 12, 13. The paper does not say which models,
images and pairs it took; what is taken here stands in ``models``, ``maps`` and ``collect_comparison``.
"""

from .comparison import (
    RepresentationComparison,
    Similarity,
    collect_comparison,
    compare_representations,
    compute_similarities,
)

__all__ = [
    "RepresentationComparison",
    "Similarity",
    "collect_comparison",
    "compare_representations",
    "compute_similarities",
]
