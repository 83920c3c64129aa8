"""Lemma 4.3, by which G_inf and G*_inf are positive definite, and its assumption that no two inputs are parallel.

A sample's row of G belongs to the function relu(v.x) / |v|_S of v. G is singular where such functions depend linearly
on each other. A relu has its kink where v.x = 0, so functions with kinks in different places are independent: that is
the lemma. Parallel inputs share the place, and then it depends on who has them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..utils.random_streams import stream
from .arc_cosine import isotropic_limit, magnitude_limit
from .ntk import FederatedInputs, Floats, block_diagonal, smallest_eigenvalue
from .settings import draw_covariance

_SIZE = 4


@dataclass(frozen=True, kw_only=True)
class LemmaCase:
    """Inputs of a kind; whether lemma 4.3 ``assumes`` it; lambda_min of G_inf (``full``) and of G*_inf (``local``)."""

    name: str
    assumes: bool
    full: float
    local: float


@dataclass(frozen=True, kw_only=True, eq=False)
class ClosingAngle:
    """lambda_min while an input of one client turns towards one of another, ``angle`` radians apart.

    ``full`` and ``local`` for clients whose covariances are proportional; ``different`` is G_inf's where they are not.
    """

    angle: Floats
    full: Floats
    local: Floats
    different: Floats


def make_cases(seed: int) -> tuple[LemmaCase, ...]:
    """Two clients in four dimensions, with inputs that are parallel in one way or another."""
    rng = stream(seed, "theory lemma")
    first, second = rng.normal(size=(2, 3, _SIZE))
    scaled, shaped = np.stack([np.eye(_SIZE), 4 * np.eye(_SIZE)]), _draw_two_shapes(rng)
    x = first[:1]
    pairs = rng.normal(size=(_SIZE + 1, _SIZE))
    rows = (
        ("no two inputs parallel", True, first, second, shaped),
        ("x and 2x on one client", False, np.concatenate([first, 2 * x]), second, shaped),
        ("x and 2x on two clients, S proportional", False, first, np.concatenate([second, 2 * x]), scaled),
        ("x and 2x on two clients, S of other shape", False, first, np.concatenate([second, 2 * x]), shaped),
        ("x and -x on one client", False, np.concatenate([first, -x]), second, shaped),
        (f"{_SIZE + 1} pairs x and -x on one client", False, np.concatenate([pairs, -pairs]), second, shaped),
    )
    return tuple(
        LemmaCase(name=name, assumes=assumes, **_integrate(_make_samples(one, two, moments)))
        for name, assumes, one, two, moments in rows
    )


def close_angle(seed: int, angles: int = 25) -> ClosingAngle:
    """Angles from a right angle down to a thousandth of a radian."""
    rng = stream(seed, "theory closing")
    first, second = rng.normal(size=(2, 3, _SIZE))
    scaled, shaped = np.stack([np.eye(_SIZE), 4 * np.eye(_SIZE)]), _draw_two_shapes(rng)
    x = first[0] / np.linalg.norm(first[0])
    aside = rng.normal(size=_SIZE)
    aside -= (aside @ x) * x
    aside /= np.linalg.norm(aside)
    angle = np.geomspace(np.pi / 2, 1e-3, angles)
    turned = [np.concatenate([second, [np.cos(at) * x + np.sin(at) * aside]]) for at in angle]
    same = [_make_samples(first, rows, scaled) for rows in turned]
    proportional = [_smallest_eigenvalues(samples, isotropic_limit(samples).magnitude) for samples in same]
    return ClosingAngle(
        angle=angle,
        full=np.array([pair["full"] for pair in proportional]),
        local=np.array([pair["local"] for pair in proportional]),
        different=np.array([_integrate(_make_samples(first, rows, shaped))["full"] for rows in turned]),
    )


def _draw_two_shapes(rng: np.random.Generator) -> Floats:
    return np.stack([draw_covariance(_SIZE, 2.0, rng)[0] for _ in range(2)])


def _make_samples(first: Floats, second: Floats, moments: Floats) -> FederatedInputs:
    client = np.repeat([0, 1], [len(first), len(second)])
    return FederatedInputs(x=np.concatenate([first, second]), client=client, covariance=moments)


def _integrate(samples: FederatedInputs) -> dict[str, float]:
    return _smallest_eigenvalues(samples, magnitude_limit(samples))


def _smallest_eigenvalues(samples: FederatedInputs, full: Floats) -> dict[str, float]:
    return {"full": smallest_eigenvalue(full), "local": smallest_eigenvalue(block_diagonal(samples, full))}
