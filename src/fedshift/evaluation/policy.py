"""Policies for clients that never trained: how one is defined, written and found, and where it applies.

A policy is written like a method, ``tent`` or ``tent(steps=3)``, and found like one: by the name of its file in
``policies``, or as ``package.module:name``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial, wraps
from typing import Annotated, Any, Literal, get_args, get_type_hints

from pydantic import Field, TypeAdapter, ValidationError
from torch.nn.modules.batchnorm import _BatchNorm

from ..config.catalog import Catalog
from ..config.expressions import list_catalog, split_expressions
from ..core.plan import Plan
from ..core.selection import Select, norm_statistics, nothing
from ..core.states import ServerState
from ..data.augmentation import Augmentation
from ..data.samples import Samples
from ..nn.recognition import find_parts
from ..tasks.task import Task
from ..utils.errors import Ref, UsageError
from ..utils.state import State, pick
from ..utils.words import join_choices
from .batch_norm import list_batch_norm_parameters, list_norm_parameters
from .unseen_clients import PolicyContext, hides_clients

SKIP = "skip"
"""Value of ``unseen`` that gives clients that never trained no model."""
Data = Literal["", "inputs", "labels"]
"""Data of a new client that a policy can use: none, only training inputs, training inputs and labels."""
Requirement = Callable[[Plan, Task], str]
"""Returns why a plan and a task do not meet it; empty if they do, as the functions ``require_*`` here."""
Count = Annotated[int, Field(ge=1)]
"""Type of a policy's argument that counts something."""
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
"""Type of a policy's argument that is a learning rate."""


def require_personal_models(plan: Plan, _: Task) -> str:
    """Clients have personal models."""
    return "" if plan.personalizes else "the one global model, shown unchanged,"


def require_statistics(plan: Plan, _: Task) -> str:
    """The model has BatchNorm statistics that training changes."""
    variances = [entry for entry in plan.entries if norm_statistics(entry) and entry.kind == "variance"]
    if any(entry.moves for entry in variances):
        return ""
    return "BatchNorm statistics are frozen" if variances else "there are no BatchNorm statistics"


def require_torch_statistics(plan: Plan, _: Task) -> str:
    """All layers with BatchNorm statistics use them as torch's BatchNorm does."""
    for entry in plan.entries:
        if not norm_statistics(entry) or entry.kind != "variance":
            continue
        if not isinstance(entry.owner, _BatchNorm) or find_parts(entry.owner) is None:
            name, kind = entry.name.rpartition(".")[0], type(entry.owner).__name__
            return f"layer {name!r} is a {kind}, which may use its statistics otherwise than torch's BatchNorm"
    return ""


def require_batch_norm(plan: Plan, _: Task) -> str:
    """BatchNorm has trained parameters."""
    return "" if list_batch_norm_parameters(plan) else "there is no BatchNorm to train"


def require_normalization(plan: Plan, _: Task) -> str:
    """Normalization layers have trained parameters."""
    return "" if list_norm_parameters(plan) else "there is no normalization with weight and bias"


def require_entropy(_: Plan, task: Task) -> str:
    """Predictions of the task have an entropy."""
    return f"predictions of {task} have no entropy" if type(task).entropy is Task.entropy else ""


@dataclass(frozen=True, kw_only=True, eq=False)
class Policy:
    """A way to make a model for a client that never trained, made by a function with :func:`policy`.

    Args:
        text: The policy as written, without arguments that have their defaults.
        adapt: Makes the model from what is known of the run and the new client's training data.
        data: The new client's data that it uses, if any.
        estimates: Whether it normalizes by the new client's samples, so that one sample may be too few.
        trains: Whether it performs the run's local work.
        replaces: Entries that the new client's data determine, so that other clients' entries are not needed.
        compares: Whether it uses other clients' models one by one, even if the server holds a complete one.
        requires: What it needs of a plan and a task.

    """

    text: str
    adapt: Callable[[PolicyContext, Samples], State]
    data: Data
    estimates: bool
    trains: bool
    replaces: Select
    compares: bool
    requires: tuple[Requirement, ...]

    def excuse(self, plan: Plan, task: Task) -> str:
        """Return why the policy does not apply to ``plan`` and ``task``; empty if it applies."""
        lacking = next(filter(None, (require(plan, task) for require in self.requires)), "")
        uncovered = hides_clients(plan) and self.takes_others(plan)
        return lacking or ("entries that clients keep have no noise of differential privacy" if uncovered else "")

    def takes_others(self, plan: Plan) -> bool:
        """Return whether the policy takes other clients' models, or entries that they keep."""
        kept = (entry for entry in plan.entries if entry.name in plan.personal)
        return self.compares or not (plan.has_global or all(map(self.replaces, kept)))


def policy(
    *, data: Data = "", estimates: bool = False, trains: bool = False, replaces: Select = nothing,
    compares: bool = False, requires: tuple[Requirement, ...] = (),
) -> Callable[[Callable[..., State]], Callable[..., Policy]]:  # fmt: skip
    """Make ``function(context, train, *, ...) -> State`` a policy by name: ``tent``, or ``tent(steps=3)``.

    Values of its options must fit their types; a type with bounds is ``Annotated[float, Field(gt=0)]`` (pydantic). For
    the other arguments see :class:`Policy`.
    """

    def decorate(function: Callable[..., State]) -> Callable[..., Policy]:
        signature = inspect.signature(function)
        options = list(signature.parameters.values())[2:]
        ours = function.__module__.startswith(f"{__package__}.policies.")
        name = function.__name__ if ours else f"{function.__module__}:{function.__name__}"

        @wraps(function)
        def make(**values: Any) -> Policy:
            _check_options(name, function, values)
            changed = [
                f"{option.name}={values[option.name]!r}"
                for option in options
                if values.get(option.name, option.default) != option.default
            ]
            return Policy(
                text=f"{name}({', '.join(changed)})" if changed else name, adapt=partial(function, **values),
                data=data, estimates=estimates, trains=trains, replaces=replaces, compares=compares, requires=requires,
            )  # fmt: skip

        make.__signature__ = signature.replace(parameters=options, return_annotation="Policy")  # type: ignore[attr-defined]
        return make

    return decorate


def _check_options(name: str, function: Callable[..., State], values: Mapping[str, Any]) -> None:
    """Raise :class:`UsageError`, about the policy ``name``, if a value does not fit the type of its option."""
    types = get_type_hints(function, include_extras=True)
    for option, value in values.items():
        try:
            TypeAdapter(types.get(option, Any)).validate_python(value, strict=True)  # True and 3.0 are not integers
        except ValidationError as error:
            told = error.errors()[0]["msg"].removeprefix("Input ")
            raise UsageError(f"{name}: {option}={value!r} {told}") from error


@cache
def list_policies() -> tuple[str, ...]:
    """Return the names of fedshift's policies, by the data that they use, then by name."""
    found = list_catalog("evaluation.policies")
    return tuple(sorted(found, key=lambda name: (get_args(Data).index(found[name]().data), name)))


def _accept(made: object, text: str | None) -> Policy:
    if isinstance(made, Policy):
        return made
    kind = type(made).__name__
    raise UsageError(f"policy for new clients {text!r} is a {kind}: decorate the function with fedshift.policy")


POLICIES = Catalog[Policy](
    "policy for new clients", "evaluation.policies", _accept, spell=lambda made: made.text, key=lambda made: made.text,
    setting="unseen",
)  # fmt: skip
"""Policies by name."""


def parse_policies(asked: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the policies in a sequence or a comma-separated text, as written in tables; None: all of fedshift's.

    Raises :class:`UsageError` for an unknown policy or unknown arguments.
    """
    if asked is None:
        return list_policies()
    named = split_expressions("policy for new clients", asked) if isinstance(asked, str) else asked
    return tuple(dict.fromkeys(POLICIES.parse(name.strip()).text for name in named))


def explain_inapplicable(plans: Iterable[Plan], wanted: Iterable[str], task: Task) -> list[str]:
    """Return sentences that explain which of the policies ``wanted`` do not apply to some plans."""
    plans, reasons = list(plans), dict[tuple[str, str], list[str]]()
    for name in wanted:
        excuses = [POLICIES.parse(name).excuse(plan, task) for plan in plans]
        for excuse in filter(None, dict.fromkeys(excuses)):
            methods = [plan.method.label for plan, own in zip(plans, excuses, strict=True) if own == excuse]
            reasons.setdefault((excuse, ", ".join(methods)), []).append(name)
    return [f"{' and '.join(names)}: {excuse} under {methods}" for (excuse, methods), names in reasons.items()]


def check_policy(plan: Plan, name: str, training: Mapping[str, Samples], task: Task) -> None:
    """Raise :class:`UsageError` if policy ``name`` cannot work with ``plan`` for newcomers with ``training`` data."""
    if name == SKIP:
        return
    asked = POLICIES.parse(name)
    if excuse := asked.excuse(plan, task):
        others = _name_those(lambda other: not other.excuse(plan, task)) or repr(SKIP)
        raise UsageError(f"unseen={name!r}: {excuse} under {plan.method.label}: use {others}")
    for client, split in training.items() if asked.trains else ():
        if len(split) < plan.smallest_batch:
            raise UsageError(
                f"client {client!r} has one training sample, over which batch normalization has no variance: it cannot "
                f"be trained on ({name!r}); leave the client out, or use 'average' or 'nearest'"
            )


def _name_those(applies: Callable[[Policy], bool]) -> str:
    """Return the names of fedshift's policies that apply, for a message."""
    return join_choices([repr(name) for name in list_policies() if applies(POLICIES.parse(name))])


def make_state(context: PolicyContext, name: str, train: Samples) -> State | None:
    """Return the model of a client with training data ``train`` by policy ``name``.

    None with ``skip`` or before any training. With a method that has one global model, ``average`` is that model.
    Raises ``Diverged`` if training diverges.
    """
    if name == SKIP:
        return None
    asked = POLICIES.parse(name)
    whole = context.plan.has_global or context.start is not None
    return asked.adapt(context, train) if context.samples or (whole and not asked.compares) else None


def make_lone_state(
    plan: Plan, server: ServerState, name: str, client: str, train: Samples, augment: Augmentation | None,
    measured: tuple[Task, int], may_train: bool = True,
) -> State | None:  # fmt: skip
    """Return the model of ``client`` by policy ``name`` without other clients' entries, as at a site that only joined.

    If the server holds a complete model, or lacks only BatchNorm entries that the policy replaces, the result is the
    model of :func:`make_state` in a simulation. None with ``skip``. ``measured``: the task and its number of classes.
    ``may_train``: whether a message may suggest policies that train. Raises :class:`UsageError` with the alternatives
    if the policy needs other clients' entries, or samples that the client lacks.
    """
    if name == SKIP:
        return None
    (task, classes), asked = measured, POLICIES.parse(name)

    def is_possible(other: Policy) -> bool:
        return not other.takes_others(plan) and (may_train or not other.trains) and not other.excuse(plan, task)

    if not is_possible(asked):
        without = "a method with a global model, or one that keeps BatchNorm statistics alone (silobn)"
        raise UsageError(
            f"unseen={name!r} takes entries that {plan.method.label} keeps at its clients, which never leave them: use "
            f"{_name_those(is_possible) or without}"
        )
    if asked.data and len(train) < max(1, plan.smallest_batch):
        raise UsageError(f"{{}} takes training samples, but client {client!r} has {len(train)}", Ref(unseen=name))
    start = None if plan.has_global else {**plan.initial, **pick(server.shared, plan.loaded)}
    context = PolicyContext(
        plan=plan, server=server, augment=augment, task=task, classes=classes, client=client, start=start
    )
    return make_state(context, name, train)
