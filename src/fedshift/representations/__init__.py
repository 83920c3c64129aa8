"""Representations in clients' and server's models: similarity of feature maps, and BatchNorm statistics.

FedWon (Zhuang & Lyu 2024, arXiv:2306.05879), section 4.2 and figures 5, 12, 13. A finished run comes in; ``comparison``
makes two frames and the data of pictures, ``rendering`` tables and sentences of them, ``figures`` pictures.
"""

from .comparison import RepresentationComparison as RepresentationComparison
from .comparison import compare_representations as compare_representations
