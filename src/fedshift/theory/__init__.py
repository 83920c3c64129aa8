"""Numerical tests of FedBN's theory: the computations, tables and figures of ``fedshift theory``.

Li et al. 2021, arXiv:2102.07623, section 4 and appendix B. The mathematics is in ``theory/ntk.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

from .checks import (
    ClosingAngle,
    CorollaryCheck,
    InfiniteWidthLimits,
    LemmaCase,
    TheorySettings,
    ToyExample,
    TrainingCourse,
    WidthComparison,
    close_angle,
    compare_training,
    compute_limits,
    compute_toy,
    make_cases,
    make_clients,
    try_corollary,
)

__all__ = ["TheoryResults", "TheorySettings", "check_theory"]


@dataclass(frozen=True, kw_only=True, eq=False)
class TheoryResults:
    """All results of the command, in the order in which it prints them."""

    setting: TheorySettings
    limits: InfiniteWidthLimits
    corollary: CorollaryCheck
    cases: tuple[LemmaCase, ...]
    closing: ClosingAngle
    widths: tuple[WidthComparison, ...]
    courses: tuple[TrainingCourse, ...]
    toy: ToyExample


def check_theory(setting: TheorySettings) -> TheoryResults:
    """Run every check; the result is a function of ``setting``, seed included, alone."""
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
