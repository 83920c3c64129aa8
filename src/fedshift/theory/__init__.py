"""FedBN's theory put to the test: what ``fedshift theory`` computes, tabulates and draws.

Li et al. 2021, arXiv:2102.07623, section 4 and appendix B; the mathematics is in ``theory/ntk.py``,
``theory/arc_cosine.py`` and ``theory/convergence.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

from .corollary import CorollaryCheck, try_corollary
from .gradient_descent import TrainingCourse, WidthComparison, compare_training
from .infinite_width import InfiniteWidthLimits, compute_limits
from .lemma import ClosingAngle, LemmaCase, close_angle, make_cases
from .settings import TheorySettings, make_clients
from .toy_example import ToyExample, compute_toy

__all__ = ["TheoryResults", "TheorySettings", "check_theory"]


@dataclass(frozen=True, kw_only=True, eq=False)
class TheoryResults:
    """All that the command finds, in the order in which it is told."""

    setting: TheorySettings
    limits: InfiniteWidthLimits
    corollary: CorollaryCheck
    cases: tuple[LemmaCase, ...]
    closing: ClosingAngle
    widths: tuple[WidthComparison, ...]
    courses: tuple[TrainingCourse, ...]
    toy: ToyExample


def check_theory(setting: TheorySettings) -> TheoryResults:
    """Everything, from the seed of ``setting`` alone."""
    samples, targets = make_clients(setting)
    found = compute_limits(setting, samples)
    widths, courses = compare_training(setting, samples, targets, found)
    return TheoryResults(
        setting=setting,
        limits=found,
        corollary=try_corollary(setting),
        cases=make_cases(setting.seed),
        closing=close_angle(setting.seed),
        widths=widths,
        courses=courses,
        toy=compute_toy(setting.seed),
    )
