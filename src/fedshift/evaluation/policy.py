"""Policies for clients that never trained: how one is defined, written and found, and where it applies.

A policy is written like a method, ``tent`` or ``tent(steps=3)``, and found like one: by the name of its file in
``policies``, or as ``package.module:name``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial, wraps
from typing import Annotated, Any, Concatenate, Literal, ParamSpec, cast, get_type_hints

from pydantic import Field, TypeAdapter, ValidationError

from ..config.catalog import Catalog
from ..config.expressions import list_catalog, split_expressions
from ..core.plan import Plan
from ..core.selection import Select, nothing
from ..core.states import ServerState
from ..data.augmentation import Augmentation
from ..data.samples import Samples
from ..tasks.task import Task
from ..utils.errors import Ref, UsageError
from ..utils.state import State, pick
from ..utils.words import join_choices
from .unseen_clients import PolicyContext, hides_clients

SKIP = "skip"
"""Value of ``unseen`` that gives clients that never trained no model."""
Data = Literal["", "inputs", "labels"]
DATA: tuple[Data, ...] = ("", "inputs", "labels")
"""Parts of a new client's training data that a policy can use: none, only inputs, inputs and labels."""
Requirement = Callable[[Plan, Task], str]
"""Returns why a plan and a task do not meet it; empty if they do (``policy_requirements``)."""
Count = Annotated[int, Field(ge=1)]
"""Type of a policy's argument that counts something."""
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
"""Type of a policy's argument that is a learning rate."""
Options = ParamSpec("Options")


@dataclass(frozen=True, kw_only=True, eq=False)
class Policy:
    """A way to make a model for a client that never trained, made by a function with :func:`policy`.

    Args:
        text: The policy as written, without arguments that have their defaults.
        adapt: Makes the model from what is known of the run and the new client's training data.
        data: The part of the new client's training data that it uses, if any.
        estimates: Whether it normalizes by the new client's samples, so that one sample may be too few.
        trains: Whether it performs the run's local work.
        learns: Whether the clients that trained learn how to adapt, on their labeled data.
        replaces: Entries that the new client's data determine, so that other clients' entries are not needed.
        compares: Whether it uses other clients' models one by one, even if the server holds a complete one.
        requires: What it needs of a plan and a task.

    """

    text: str
    adapt: Callable[[PolicyContext, Samples], State]
    data: Data
    estimates: bool
    trains: bool
    learns: bool
    replaces: Select
    compares: bool
    requires: tuple[Requirement, ...]

    def excuse(self, plan: Plan, task: Task) -> str:
        """Return why the policy does not apply to ``plan`` and ``task``; empty if it applies."""
        return next(filter(None, (lacking(plan, task) for lacking in self.requires)), "") or self._uncovered(plan)

    def takes_others(self, plan: Plan) -> bool:
        """Return whether the policy takes other clients' models, labels, or entries that they keep."""
        kept = (entry for entry in plan.entries if entry.name in plan.personal)
        return self.compares or self.learns or not (plan.has_global or all(map(self.replaces, kept)))

    def _uncovered(self, plan: Plan) -> str:
        """Return what the policy takes of other clients without the noise of differential privacy; empty if nothing."""
        of_samples = getattr(plan.method.gradient, "noise_multiplier", 0)
        if hides_clients(plan) and self.takes_others(plan):
            return "clients' labels, or entries that they keep, have no noise of differential privacy"
        if of_samples and self.learns:
            return "it learns from clients' labels, which have no noise of differential privacy"
        return ""


def policy(
    *, data: Data = "", estimates: bool = False, trains: bool = False, learns: bool = False, replaces: Select = nothing,
    compares: bool = False, requires: tuple[Requirement, ...] = (),
) -> Callable[[Callable[Concatenate[PolicyContext, Samples, Options], State]], Callable[Options, Policy]]:  # fmt: skip
    """Make ``function(context, train, *, ...) -> State`` a policy by name: ``tent``, or ``tent(steps=3)``.

    Values of its options must fit their types; a type with bounds is ``Annotated[float, Field(gt=0)]`` (pydantic). For
    the other arguments see :class:`Policy`.
    """

    def decorate(function: Callable[Concatenate[PolicyContext, Samples, Options], State]) -> Callable[Options, Policy]:
        signature = inspect.signature(function)
        options = list(signature.parameters.values())[2:]
        own = not function.__module__.startswith(f"{__package__}.policies.")
        name = f"{function.__module__}:{function.__name__}" if own else function.__name__

        @wraps(function)
        def make(*_: Options.args, **given: Options.kwargs) -> Policy:
            _check_options(name, function, given)
            defaults = {each.name: each.default for each in options}
            changed = [
                f"{each}={given[each]!r}" for each in defaults if given.get(each, defaults[each]) != defaults[each]
            ]
            return Policy(
                text=f"{name}({', '.join(changed)})" if changed else name, adapt=partial(function, **given),
                data=data, estimates=estimates, trains=trains, learns=learns, replaces=replaces, compares=compares,
                requires=requires,
            )  # fmt: skip

        make.__signature__ = signature.replace(parameters=options, return_annotation="Policy")  # type: ignore[attr-defined]
        return cast("Callable[Options, Policy]", make)

    return decorate


def _check_options(name: str, function: Callable[..., State], given: Mapping[str, Any]) -> None:
    """Raise :class:`UsageError`, about the policy ``name``, if a value does not fit the type of its option."""
    types = get_type_hints(function, include_extras=True)
    for option, value in given.items():
        try:
            TypeAdapter(types.get(option, Any)).validate_python(value, strict=True)  # True and 3.0 are not integers
        except ValidationError as error:
            told = error.errors()[0]["msg"].removeprefix("Input ")
            raise UsageError(f"{name}: {option}={value!r} {told}") from error


@cache
def list_policies() -> tuple[str, ...]:
    """Return the names of fedshift's policies, by the data that they use, then by name."""
    found = list_catalog("evaluation.policies")
    return tuple(sorted(found, key=lambda name: (DATA.index(found[name]().data), name)))


def _accept(made: object, text: str | None) -> Policy:
    if not isinstance(made, Policy):
        raise UsageError(
            f"policy for new clients {text!r} is a {type(made).__name__}: decorate the function with fedshift.policy"
        )
    return made


POLICIES = Catalog[Policy](
    "policy for new clients",
    "evaluation.policies",
    _accept,
    spell=lambda made: made.text,
    key=lambda made: made.text,
    setting="unseen",
)
"""Policies by name."""


def parse_policies(asked: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the policies in a sequence or a comma-separated text, as written in tables.

    None: all of fedshift's except ``atp``, for which the clients that trained must do further work.

    Raises :class:`UsageError` for an unknown policy or unknown arguments.
    """
    if asked is None:
        return tuple(name for name in list_policies() if not POLICIES.parse(name).learns)
    named = split_expressions("policy for new clients", asked) if isinstance(asked, str) else asked
    return tuple(dict.fromkeys(POLICIES.parse(name.strip()).text for name in named))


def explain_inapplicable(plans: Iterable[Plan], wanted: Iterable[str], task: Task) -> list[str]:
    """Return sentences that explain which of the policies ``wanted`` do not apply to some plans."""
    reasons: dict[tuple[str, str], list[str]] = {}
    plans = list(plans)
    for name in wanted:
        affected: dict[str, list[str]] = {}
        for plan in plans:
            if excuse := POLICIES.parse(name).excuse(plan, task):
                affected.setdefault(excuse, []).append(plan.method.label)
        for excuse, methods in affected.items():
            reasons.setdefault((excuse, ", ".join(methods)), []).append(name)
    return [f"{' and '.join(names)}: {excuse} under {methods}" for (excuse, methods), names in reasons.items()]


def check_policy(plan: Plan, name: str, training: Mapping[str, Samples], task: Task) -> None:
    """Raise :class:`UsageError` if policy ``name`` cannot work with ``plan`` for newcomers with ``training`` data."""
    if name == SKIP:
        return
    made = POLICIES.parse(name)
    if excuse := made.excuse(plan, task):
        others = [repr(other) for other in list_policies() if not POLICIES.parse(other).excuse(plan, task)]
        raise UsageError(
            f"unseen={name!r}: {excuse} under {plan.method.label}: use {join_choices(others) or repr(SKIP)}"
        )
    for client, split in training.items() if made.trains else ():
        if len(split) < plan.smallest_batch:
            raise UsageError(
                f"client {client!r} has one training sample, over which batch normalization has no variance: it cannot "
                f"be trained on ({name!r}); leave the client out, or use 'average' or 'nearest'"
            )


def make_state(context: PolicyContext, name: str, train: Samples) -> State | None:
    """Return the model of a client with training data ``train`` by policy ``name``.

    None with ``skip`` or before any training. With a method that has one global model, ``average`` is that model.
    Raises ``Diverged`` if training diverges.
    """
    if name == SKIP:
        return None
    made = POLICIES.parse(name)
    whole = context.plan.has_global or context.start is not None
    return made.adapt(context, train) if context.samples or (whole and not made.compares) else None


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
    task, classes = measured

    def is_possible(asked: Policy) -> bool:
        possible = not asked.takes_others(plan) and (may_train or not asked.trains)
        return possible and not asked.excuse(plan, task)

    made = POLICIES.parse(name)
    if not is_possible(made):
        others = [repr(other) for other in list_policies() if is_possible(POLICIES.parse(other))]
        own = f"entries that {plan.method.label} keeps at its clients"
        taken = "other clients' labeled data" if made.learns else own
        without = "a method with a global model, or one that keeps BatchNorm statistics alone (silobn)"
        raise UsageError(
            f"unseen={name!r} takes {taken}, which never leave them: use {join_choices(others) or without}"
        )
    if made.data and len(train) < max(1, plan.smallest_batch):
        raise UsageError(f"{{}} takes training samples, but client {client!r} has {len(train)}", Ref(unseen=name))
    context = PolicyContext(
        plan=plan, server=server, augment=augment, task=task, classes=classes, client=client,
        start=None if plan.has_global else {**plan.initial, **pick(server.shared, plan.loaded)},
    )  # fmt: skip
    return make_state(context, name, train)
