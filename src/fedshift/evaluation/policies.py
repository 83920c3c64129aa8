"""Policies for clients that never trained: their arguments, the data and models they use, and where they apply.

A policy is written like a method, ``tent`` or ``tent(steps=3)``. The functions of this module that return a
:class:`Policy` are the policies by name; ``unseen_clients`` makes the models.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

from torch.nn.modules.batchnorm import _BatchNorm

from ..config.expressions import expressions, split_expressions
from ..core.plan import Plan
from ..core.selection import Select, batch_norm, norm_layers, norm_statistics, normalizes_as_torch, nothing
from ..data.samples import Samples
from ..tasks.task import Task
from ..utils.errors import UsageError, unknown_name

SKIP = "skip"
"""Value of ``unseen`` that gives clients that never trained no model."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Policy:
    """A way to make a model for a client that never trained.

    Args:
        name: Name of the policy.
        arguments: All its arguments.
        text: The policy as written, without arguments that have their defaults.
        data: The part of the new client's training data that it uses, if any.
        estimates: Whether it normalizes by the new client's samples, so that one sample may be too few.
        trains: Whether it performs the run's local work.
        learns: Whether the clients that trained learn how to adapt, on their labeled data.
        replaces: Entries that the new client's data determine, so that other clients' entries are not needed.
        compares: Whether it uses other clients' models one by one, even if the server holds a complete one.
        excuses: Functions that return why the policy does not apply to a plan and a task; empty if it applies.

    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""
    data: Literal["", "inputs", "labels"] = ""
    estimates: bool = False
    trains: bool = False
    learns: bool = False
    replaces: Select = nothing
    compares: bool = False
    excuses: tuple[Callable[[Plan, Task], str], ...] = ()

    def excuse(self, plan: Plan, task: Task) -> str:
        """Return why the policy does not apply to ``plan`` and ``task``; empty if it applies."""
        return next(filter(None, (excuse(plan, task) for excuse in self.excuses)), "") or self._uncovered(plan)

    def takes_others(self, plan: Plan) -> bool:
        """Return whether the policy takes other clients' models, labels, or entries that they keep."""
        kept = (entry for entry in plan.entries if entry.name in plan.personal)
        return self.compares or self.learns or not (plan.has_global or all(map(self.replaces, kept)))

    def _uncovered(self, plan: Plan) -> str:
        """Return what the policy takes of other clients without the noise of differential privacy; empty if nothing."""
        of_samples = any(getattr(rule, "noise_multiplier", 0) for rule in plan.method.rules)
        if hides_clients(plan) and self.takes_others(plan):
            return "clients' labels, or entries that they keep, have no noise of differential privacy"
        if of_samples and self.learns:
            return "clients' labels, from which it learns, have no noise of differential privacy"
        return ""


def hides_clients(plan: Plan) -> bool:
    """Return whether the aggregation of ``plan`` hides each client in noise (``analysis.privacy.Mechanism``)."""
    return bool(getattr(plan.method.aggregate, "noise_multiplier", 0))


def has_statistics(plan: Plan) -> bool:
    """Return whether the model of ``plan`` has BatchNorm statistics."""
    return any(map(norm_statistics, plan.entries))


def list_batch_norm_parameters(plan: Plan) -> frozenset[str]:
    """Return the trained parameters of BatchNorm layers in ``plan``."""
    return frozenset(entry.name for entry in plan.entries if batch_norm(entry)) & plan.trained


def list_norm_parameters(plan: Plan) -> frozenset[str]:
    """Return the trained parameters of all normalization layers in ``plan``."""
    return frozenset(entry.name for entry in plan.entries if norm_layers(entry)) & plan.trained


def _one_model(plan: Plan, _: Task) -> str:
    return "" if plan.personalizes else "the one global model, shown unchanged,"


def _no_statistics(plan: Plan, _: Task) -> str:
    return "" if has_statistics(plan) else "there are no BatchNorm statistics"


def _foreign_statistics(plan: Plan, _: Task) -> str:
    for name, layer in plan.module.named_modules():
        if isinstance(layer, _BatchNorm) and layer.running_mean is not None and not normalizes_as_torch(layer):
            return (
                f"layer {name!r} is a {type(layer).__name__}, which uses its statistics otherwise than torch's"
                " BatchNorm"
            )
    return ""


def _shared_statistics(plan: Plan, _: Task) -> str:
    kept = any(norm_statistics(entry) and entry.name in plan.personal for entry in plan.entries)
    return "" if kept else "clients keep no BatchNorm statistics to compare"


def _no_batch_norm(plan: Plan, _: Task) -> str:
    return "" if list_batch_norm_parameters(plan) else "there is no BatchNorm to train"


def _no_normalization(plan: Plan, _: Task) -> str:
    return "" if list_norm_parameters(plan) else "there is no normalization with weight and bias"


def _no_entropy(_: Plan, task: Task) -> str:
    return f"predictions of {task} have no entropy" if type(task).entropy is Task.entropy else ""


def _require(name: str, value: Any, kind: tuple[type, ...], valid: Callable[[Any], bool], allowed: str) -> None:
    if not isinstance(value, kind) or isinstance(value, bool) or not valid(value):
        raise UsageError(f"{name}={value!r}: {allowed}")


def average() -> Policy:
    """Complete the server's entries by the average of the clients' personal ones (FedWon, arXiv:2306.05879, table 12).

    The average has the method's weights of uploads.
    """
    return Policy(name="average", excuses=(_one_model,))


def reestimate() -> Policy:
    """Use the average, with BatchNorm statistics of the new client's inputs (FedBN, arXiv:2102.07623, appendix G)."""
    return Policy(
        name="reestimate", data="inputs", estimates=True, replaces=norm_statistics,
        excuses=(_no_statistics, _foreign_statistics),
    )  # fmt: skip


def mixed(*, alpha: float | None = None, prior: float = 16.0) -> Policy:
    """Use the average, with BatchNorm statistics alpha * stored + (1 - alpha) * those of the new client's inputs.

    Means and variances are mixed alike (Schneider et al. 2020, arXiv:2006.16971; formula from their public code,
    ``BayesianBatchNorm`` of bethgelab/robustness, whose ``prior`` is alpha). ``alpha``: None means prior / (prior + n)
    for n inputs, the paper's N / (N + n). ``prior``: N, the number of inputs that the stored statistics count as; ATP's
    public code (baowenxuan/ATP) uses 16 for this baseline. You et al. 2021 call a fixed alpha alpha-BN
    (arXiv:2110.04065; only the abstract was available).
    """
    if alpha is not None:
        _require("alpha", alpha, (int, float), lambda value: 0 <= value <= 1, "give a number from 0 to 1")
    _require("prior", prior, (int, float), lambda value: 0 <= value < float("inf"), "give a number of 0 or more")
    return Policy(
        name="mixed", arguments={"alpha": alpha, "prior": prior}, data="inputs", estimates=True,
        excuses=(_no_statistics, _foreign_statistics),
    )  # fmt: skip


def tent(*, steps: int = 1, lr: float = 1e-3, batch_size: int = 64) -> Policy:
    """Minimize the entropy of predictions over weight and bias of normalization layers (Wang et al. 2021).

    Tent (arXiv:2006.10726) in its offline form: one pass over the new client's inputs with ``steps`` steps of Adam on
    each batch, with BatchNorm normalizing by the batch; then BatchNorm statistics are set to those of all inputs. Other
    layers normalize as usual. Adam, this ``lr`` and one step come from the authors' public code for CIFAR-10-C
    (DequanWang/tent), where a batch has 200 inputs.
    """
    _require("steps", steps, (int,), lambda value: value >= 1, "give a whole number of 1 or more")
    _require("lr", lr, (int, float), lambda value: 0 < value < float("inf"), "give a positive number")
    _require("batch_size", batch_size, (int,), lambda value: value >= 1, "give a whole number of 1 or more")
    return Policy(
        name="tent", arguments={"steps": steps, "lr": lr, "batch_size": batch_size}, data="inputs", estimates=True,
        replaces=norm_statistics,
        excuses=(_no_normalization, _no_entropy, _foreign_statistics),
    )  # fmt: skip


def sar(
    *, lr: float = 1e-3, batch_size: int = 64, margin: float = 0.4, rho: float = 0.05, reset: float = 0.029
) -> Policy:
    """Minimize the entropy of certain predictions over normalization, toward a flat minimum (Niu et al. 2023).

    SAR (arXiv:2302.12400; formulas from the authors' public code, mr-eggplant/SAR) in the offline form of ``tent``.
    Predictions whose entropy is at least ``margin`` of the highest are excluded. The gradient is taken at the point
    ``rho`` farther up, over the predictions that are still certain there; steps are SGD's with momentum 0.9. The last
    quarter of normalization layers is not trained. If the moving average of the entropy falls below ``reset`` of the
    highest, everything restarts from the average; 0.029 is the authors' 0.2 for a thousand classes. A batch without a
    certain prediction changes nothing.
    """
    _require("lr", lr, (int, float), lambda value: 0 < value < float("inf"), "give a positive number")
    _require("batch_size", batch_size, (int,), lambda value: value >= 1, "give a whole number of 1 or more")
    _require("margin", margin, (int, float), lambda value: 0 < value <= 1, "give a number above 0 and at most 1")
    _require("rho", rho, (int, float), lambda value: 0 <= value < float("inf"), "give a number of 0 or more")
    _require("reset", reset, (int, float), lambda value: 0 <= value < 1, "give a number from 0 to below 1")
    return Policy(
        name="sar", data="inputs", estimates=True, replaces=norm_statistics,
        excuses=(_no_normalization, _no_entropy, _foreign_statistics),
        arguments={"lr": lr, "batch_size": batch_size, "margin": margin, "rho": rho, "reset": reset},
    )  # fmt: skip


def atp(*, rounds: int = 10, lr: float = 0.1, batch_size: int = 20) -> Policy:
    """Adapt each entry of the average at a rate that the clients that trained have learned (ATP, Bao et al. 2023).

    Formulas are in ``adaptation_rates``; ``lr`` and ``batch_size`` are from the authors' code. ``rounds``: rounds in
    which the clients learn, on validation data if they have some, as in that code, else on training data; the default
    is ours, for few clients (the code has 400 rounds of a quarter of 240 clients).
    """
    _require("rounds", rounds, (int,), lambda value: value >= 1, "give a whole number of 1 or more")
    _require("lr", lr, (int, float), lambda value: 0 < value < float("inf"), "give a positive number")
    _require("batch_size", batch_size, (int,), lambda value: value >= 1, "give a whole number of 1 or more")
    return Policy(
        name="atp", arguments={"rounds": rounds, "lr": lr, "batch_size": batch_size}, data="inputs", learns=True,
        excuses=(_no_entropy, _foreign_statistics),
    )  # fmt: skip


def nearest() -> Policy:
    """Use the model of the client that fits the new client's labeled training data best."""
    return Policy(name="nearest", data="labels", compares=True, excuses=(_one_model,))


def nearest_statistics() -> Policy:
    """Use the model of the client whose BatchNorm statistics are nearest to those of the new client's inputs.

    The distance is FedAP's (Lu et al. 2022, arXiv:2112.00734; formula from the authors' public code,
    microsoft/PersonalizedFL): the sum over layers of the Wasserstein distance between normal distributions with these
    means and variances. Each client's own network measures the new client's inputs; FedAP uses one pretrained network
    for all clients.
    """
    return Policy(
        name="nearest_statistics", data="inputs", compares=True,
        excuses=(_one_model, _no_statistics, _shared_statistics, _foreign_statistics),
    )  # fmt: skip


def weighted() -> Policy:
    """Complete the server's entries by the clients' personal ones, each weighted by the inverse of its distance.

    Distances are computed as in ``nearest_statistics``; weights of 1 / distance are FedAP's.
    """
    return Policy(
        name="weighted", data="inputs", compares=True,
        excuses=(_one_model, _no_statistics, _shared_statistics, _foreign_statistics),
    )  # fmt: skip


def finetune() -> Policy:
    """Train the average on the new client's labeled data by the trial's own local work."""
    return Policy(name="finetune", data="labels", estimates=True, trains=True)


def finetune_bn() -> Policy:
    """Learn BatchNorm alone on the new client's labeled data (FedBN, arXiv:2102.07623, appendix G)."""
    return Policy(
        name="finetune_bn", data="labels", estimates=True, trains=True, replaces=batch_norm,
        excuses=(_no_batch_norm, _foreign_statistics),
    )  # fmt: skip


CATALOG: Mapping[str, Callable[..., Policy]] = {
    function.__name__: function
    for function in (
        average, reestimate, mixed, tent, sar, atp, nearest, nearest_statistics, weighted, finetune, finetune_bn
    )
}  # fmt: skip
POLICIES = tuple(CATALOG)
"""Names of all policies."""


@cache
def parse_policy(text: str, kind: str = "policy for new clients") -> Policy:
    """Return the policy written as ``text``; raise :class:`UsageError`, about a ``kind``, if there is none."""

    def find(name: str) -> Callable[..., Policy]:
        if name not in CATALOG:
            allowed = (*CATALOG, SKIP) if kind == "value of unseen" else CATALOG
            raise unknown_name(kind, name, allowed)
        return CATALOG[name]

    found: list[Policy] = expressions(kind, text, find)
    if len(found) != 1:
        raise UsageError(f"{kind} {text!r} names {len(found)}: give one")
    (made,) = found
    defaults = inspect.signature(CATALOG[made.name]).parameters
    given = [f"{key}={value!r}" for key, value in made.arguments.items() if value != defaults[key].default]
    return replace(made, text=f"{made.name}({', '.join(given)})" if given else made.name)


def parse_policies(asked: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the policies in a sequence or a comma-separated text, as written in tables.

    None: all except ``atp``, for which the clients that trained must do further work.

    Raises :class:`UsageError` for an unknown policy or unknown arguments.
    """
    if asked is None:
        return tuple(name for name in POLICIES if not parse_policy(name).learns)
    named = split_expressions("policy for new clients", asked) if isinstance(asked, str) else asked
    return tuple(dict.fromkeys(parse_policy(name.strip()).text for name in named))


def explain_inapplicable(plans: Iterable[Plan], wanted: Iterable[str], task: Task) -> list[str]:
    """Return sentences that explain which of the policies ``wanted`` do not apply to which plans."""
    reasons: dict[tuple[str, str], list[str]] = {}
    plans = list(plans)
    for policy in wanted:
        affected: dict[str, list[str]] = {}
        for plan in plans:
            if excuse := parse_policy(policy).excuse(plan, task):
                affected.setdefault(excuse, []).append(plan.method.name)
        for excuse, methods in affected.items():
            reasons.setdefault((excuse, ", ".join(methods)), []).append(policy)
    return [f"{' and '.join(names)}: {excuse} under {methods}" for (excuse, methods), names in reasons.items()]


def check_policy(plan: Plan, policy: str, training: Mapping[str, Samples], task: Task) -> None:
    """Raise :class:`UsageError` if ``policy`` cannot work with ``plan`` for newcomers with ``training`` data."""
    if policy == SKIP:
        return
    made = parse_policy(policy)
    if excuse := made.excuse(plan, task):
        others = [repr(name) for name in POLICIES if not parse_policy(name).excuse(plan, task)]
        fix = f"use {' or '.join(filter(None, (', '.join(others[:-1]), *others[-1:])))}" if others else f"use {SKIP!r}"
        raise UsageError(f"unseen={policy!r}: {excuse} under {plan.method.name}: {fix}")
    for name, split in training.items() if made.trains else ():
        if len(split) < plan.smallest_batch:
            raise UsageError(
                f"client {name!r} has one training sample, over which batch normalization has no variance: it cannot "
                f"be trained on ({policy!r}); leave the client out, or use 'average' or 'nearest'"
            )
