"""FedBN's theory put to the test: what ``fedshift theory`` computes, tabulates and draws.

Li et al. 2021, arXiv:2102.07623, section 4 and appendix B; the mathematics is in ``analysis/ntk.py``,
``analysis/arc_cosine.py`` and ``analysis/convergence.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

from .corollary import Corollary, try_corollary
from .lemma import Case, Closing, cases, closing
from .limits import Limits, limits
from .setting import Setting, clients_of
from .toy import Toy, toy
from .training import Course, Width, training

__all__ = ["Findings", "Setting", "study"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Findings:
    """All that the command finds, in the order in which it is told."""

    setting: Setting
    limits: Limits
    corollary: Corollary
    cases: tuple[Case, ...]
    closing: Closing
    widths: tuple[Width, ...]
    courses: tuple[Course, ...]
    toy: Toy


def study(setting: Setting) -> Findings:
    """Everything, from the seed of ``setting`` alone."""
    samples, targets = clients_of(setting)
    found = limits(setting, samples)
    widths, courses = training(setting, samples, targets, found)
    return Findings(
        setting=setting,
        limits=found,
        corollary=try_corollary(setting),
        cases=cases(setting.seed),
        closing=closing(setting.seed),
        widths=widths,
        courses=courses,
        toy=toy(setting.seed),
    )
