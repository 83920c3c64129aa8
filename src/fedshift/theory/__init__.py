"""Numerical tests of FedBN's theory: the computations, tables and figures of ``fedshift theory``.

Li et al. 2021, arXiv:2102.07623, section 4 and appendix B. The mathematics is in ``theory/ntk.py``.
"""

from .checks import TheoryResults, TheorySettings, check_theory

__all__ = ["TheoryResults", "TheorySettings", "check_theory"]
