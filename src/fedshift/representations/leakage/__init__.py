"""Reconstruction of images from a client's upload by a curious server: the attacks and study of ``fedshift leak``.

FedBN's authors suggest this study (Li et al. 2021, arXiv:2102.07623, section 6): hidden BatchNorm "should make attacks
on local data more challenging". The attack is in ``attack``, its mathematics in :mod:`fedshift.analysis.inversion`.
"""

from .study import Leakage as Leakage
from .study import LeakageSettings as LeakageSettings
from .study import measure_leakage as measure_leakage
