"""Output of ``fedshift theory``: a sentence and a table for each question, and the numbers as plain values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np
from rich.console import RenderableType

from ..report.formatting import make_table, to_terminal
from . import TheoryResults
from .checks import METHODS, ROUNDING

SHARES = (0.1, 0.01, 0.001)
"""Shares of the initial squared residual until which steps are counted."""


def render_theory(found: TheoryResults) -> Iterator[RenderableType]:
    """Yield sentences and tables, in order."""
    setting, limits = found.setting, found.limits
    yield (
        f"{setting.clients} clients of {setting.samples} samples in {setting.dimension} dimensions, heterogeneity "
        f"{setting.heterogeneity:g}, seed {setting.seed}."
    )
    yield _make_table(
        ("expected Gram matrix", "lambda_min", "lambda_max", "max / min"),
        [
            (name, _format_eigenvalue(least), f"{most:.3f}", _format_ratio(most, least))
            for name, least, most in zip(("G_inf, FedAvg", "G*_inf, FedBN"), limits.least, limits.most, strict=True)
        ],
    )
    yield f"lambda_min of each client's block of G_inf: {' '.join(map(_format_eigenvalue, limits.own))}"
    yield (
        f"Arc-cosine kernels, integrated, against {setting.monte_carlo:,} sampled neurons: {limits.difference:.1e} of "
        f"the norm apart (Frobenius), by entry {limits.spread:.2f} standard errors (root mean square), at most "
        f"{limits.worst:.1f}."
    )
    yield (
        f"Corollary 4.6 on {setting.draws:,} random federations of 2 to 4 clients with 2 to 4 samples (V of 256 "
        "neurons, alpha 1): is FedBN's lambda_min ever the smaller?"
    )
    yield _make_table(
        ("matrix", "federations where it is", "FedBN / FedAvg, least", "median"), list(_render_corollary(found))
    )
    yield "Lemma 4.3: lambda_min where inputs are parallel, and where they are not."
    yield _make_table(
        ("inputs", "assumed", "G_inf", "G*_inf"),
        [
            (case.name, "yes" if case.assumes else "no", _format_eigenvalue(case.full), _format_eigenvalue(case.local))
            for case in found.cases
        ],
    )
    yield "Networks at their start against the limit; largest gap of the residual in training from its prediction."
    yield _make_table(
        ("neurons", "|G - G_inf| / |G_inf|", "lambda_min G", "G*", *METHODS),
        [
            (
                str(width.neurons), f"{width.distance:.4f}", *map(_format_eigenvalue, (width.full, width.local)),
                *(f"{width.error[method]:.1e}" for method in METHODS),
            )
            for width in found.widths
        ],
    )  # fmt: skip
    yield (
        f"Gradient descent, {setting.steps} step{'s' * (setting.steps > 1)} with {setting.width} neurons, alpha "
        f"{setting.alpha:g}: share of the squared residual that is left, and steps to a share; measured (predicted)."
    )
    early = max(1, setting.steps // 20)
    header = ("method", "lambda_min", f"after {early}", f"after {setting.steps}", *(f"to {s:g}" for s in SHARES))
    yield _make_table((*header, "bound"), list(_render_courses(found, early)))
    yield from _render_toy(found)


def to_plain_values(found: TheoryResults) -> dict[str, Any]:
    """Return the results as plain values for JSON; None where there were too few steps."""
    corollary, best = found.corollary, found.toy.best_scales()
    return {
        "setting": asdict(found.setting),
        "limits": {
            "lambda_min": dict(zip(("G_inf", "G*_inf"), found.limits.least, strict=True)),
            "lambda_max": dict(zip(("G_inf", "G*_inf"), found.limits.most, strict=True)),
            "lambda_min of blocks": found.limits.own.tolist(),
            "monte carlo": {
                "relative difference": found.limits.difference,
                "root mean square in standard errors": found.limits.spread,
                "largest in standard errors": found.limits.worst,
            },
        },
        "corollary": {
            name: {"violations": corollary.count_violations(pairs), "lambda_min": pairs.tolist()}
            for name, pairs in asdict(corollary).items()
        },
        "lemma": [asdict(case) for case in found.cases],
        "closing": {name: values.tolist() for name, values in asdict(found.closing).items()},
        "widths": [asdict(width) for width in found.widths],
        "training": [
            {
                "method": course.method,
                "lambda_min": course.least,
                "steps to": {f"{share:g}": course.steps_to(share) for share in SHARES},
                "measured": course.measured.tolist(),
                "predicted": course.predicted.tolist(),
                "guarantee": course.guarantee.tolist(),
            }
            for course in found.courses
        ],
        "toy": {
            **{
                name: {"best w": w.tolist(), "mean w": mean, "loss at the mean": left.tolist()}
                for name, losses in (("without normalization", found.toy.raw), ("normalized", found.toy.normalized))
                for w, mean, left in [found.toy.best_frequencies(losses)]
            },
            "gamma": best[0].tolist(),
            "loss, own gamma": best[2].tolist(),
            "loss, averaged gamma": best[3].tolist(),
        },
    }


def _render_corollary(found: TheoryResults) -> Iterator[tuple[str, ...]]:
    corollary = found.corollary
    for name, pairs in (
        ("G_inf (the corollary)", corollary.magnitude),
        ("V + G*, all on one loss", corollary.joint),
        ("V + N G*, Algorithm 1", corollary.run),
    ):
        ratio = pairs[:, 1] / pairs[:, 0]
        yield name, str(corollary.count_violations(pairs)), f"{ratio.min():.4f}", f"{np.median(ratio):.3f}"


def _render_courses(found: TheoryResults, early: int) -> Iterator[tuple[str, ...]]:
    for course in found.courses:
        steps = (
            " ".join(("-" if measured is None else str(measured), f"({'-' if predicted is None else predicted})"))
            for measured, predicted in map(course.steps_to, SHARES)
        )
        kept = bool(np.all(course.measured <= course.guarantee * (1 + 1e-12)))
        left = (f"{course.measured[at]:.4f} ({course.predicted[at]:.4f})" for at in (early, found.setting.steps))
        yield course.method, _format_eigenvalue(course.least), *left, *steps, "kept" if kept else "broken"


def _render_toy(found: TheoryResults) -> Iterator[str]:
    for name, losses in (("without normalization", found.toy.raw), ("with it", found.toy.normalized)):
        (one, two), mean, (left, right) = found.toy.best_frequencies(losses)
        yield (
            f"Toy example, {name}: the clients' best w are {one:.2f} and {two:.2f}; at their mean {mean:.2f} the "
            f"losses are {left:.3f} and {right:.3f}."
        )
    (one, two), mean, own, averaged = found.toy.best_scales()
    yield (
        f"Its figure 2: the clients' best gamma are {one:.2f} and {two:.2f}; the losses are {own[0]:.3f} and "
        f"{own[1]:.3f} with their own, {averaged[0]:.3f} and {averaged[1]:.3f} with the mean {mean:.2f}."
    )


def _format_eigenvalue(value: float) -> str:
    return "0" if abs(value) < ROUNDING else f"{value:.5f}" if value >= 1e-4 else f"{value:.1e}"


def _format_ratio(most: float, least: float) -> str:
    if least < ROUNDING * most:
        return "-"
    return f"{most / least:.0f}" if most < 1e6 * least else f"{most / least:.0e}"


def _make_table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> RenderableType:
    return to_terminal(make_table(header, rows))
