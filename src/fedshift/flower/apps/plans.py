"""Methods for Flower apps with their own training loop; methods that such a loop cannot implement are refused.

Scope, surgery, aggregation and server optimizer work outside the training loop. Rules, local work and frozen statistics
are part of the loop, so methods that use any of these are refused. The exception is rules that only change gradients,
which need one line in any loop.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ...core.kernel import init_client, init_server, load_state
from ...core.method import Method
from ...core.optimizer import SGD
from ...core.plan import Plan
from ...core.preparation import apply_surgery, prepare
from ...core.rule import HOOKS, Rule
from ...core.selection import nothing
from ...core.step import transform_gradients
from ...methods.agc import Clipping
from ...methods.fedbn import fedbn
from ...methods.fednova import NormalizedAveraging
from ...methods.fedprox import Proximal
from ...utils.errors import UsageError
from ...utils.state import State, pick
from ..messages import RefusedMessage

T = TypeVar("T")
ELSEWHERE = "run it by `fedshift serve` and `fedshift join`, or choose another method"
EXPERIMENT, ROUNDS, FIRST = "fedshift-experiment", "fedshift-rounds", "fedshift-first-entries"
"""Keys in a message's configuration: the name below which clients keep entries; rounds done by the server, and the last
of this node (0: none); for a node without one, first values of its local entries (safetensors)."""
MARK = "_fedshift_surgery"
"""Attribute of a network: the surgery that it had."""
OUTSIDE = {"name", "typed", "components", "surgery", "scope", "weighting"}
"""Choices of a method that are made outside the training loop."""
IN_ANY_LOOP = (Clipping, Proximal)
"""Rules that only change gradients, for :func:`transform_gradients_`."""
_PLANS: WeakKeyDictionary[nn.Module, tuple[Method, Plan]] = WeakKeyDictionary()
"""The method whose gradients a network last followed, and its plan."""


def prepare_model(method: Method, model: nn.Module) -> nn.Module:
    """Return a copy of ``model`` after the method's surgery; an app's server and all its clients must use this network.

    Surgery draws new weights from torch's generator. Raises :class:`UsageError` if surgery does not fit the network.
    """
    check_arguments(method, model)
    changed = apply_surgery(method, model)
    setattr(changed, MARK, method.surgery)
    return changed


def list_local_entries(model: nn.Module, method: Method | None = None) -> frozenset[str]:
    """Return the names of the entries of ``model`` that ``method`` (default: FedBN) keeps on a client.

    Raises :class:`UsageError` if the method does not fit the model or a Flower app.
    """
    return resolve_plan(fedbn() if method is None else method, model).personal


@torch.no_grad()
def transform_gradients_(method: Method, model: nn.Module, received: State | None = None) -> None:
    """Change the gradients of ``model`` as ``method`` does: FedProx's proximal term, adaptive gradient clipping.

    Call it between ``loss.backward()`` and ``optimizer.step()``. It changes nothing for methods without these rules.

    Args:
        method: the method.
        model: the network in training.
        received: copies of its parameters before training, by name; FedProx keeps parameters close to these.

    Raises:
        UsageError: if the method does not fit the model or a Flower app, or needs copies that ``received`` lacks.

    """
    last, plan = _PLANS.get(model, (None, None))
    if plan is None or last != method:
        plan = resolve_plan(method, model)
        _PLANS[model] = method, plan
    params: State = {name: param for name, param in model.named_parameters() if param.grad is not None}
    grads = {name: param.grad for name, param in params.items() if param.grad is not None}
    near = received or {}
    for bound in (plan.rules[index] for index in plan.defines("gradients")):
        for name in params if bound.rule.needs_shared else ():
            if name not in near or near[name].data_ptr() == params[name].data_ptr():
                raise UsageError(
                    f"{bound.rule.source_method} needs a copy of {name!r} as the client received it: before training, "
                    "received = {name: param.detach().clone() for name, param in model.named_parameters()}"
                )
    job = load_state(plan, init_client(plan), init_server(plan))
    job = replace(job, params=params, global_params=pick(near, plan.loaded))
    grads = transform_gradients(plan, job, grads, torch.zeros((), dtype=torch.int64))
    for name, param in params.items():
        param.grad = grads[name]


def resolve_plan(method: Method, model: nn.Module, seed: int = 0) -> Plan:
    """Return the plan of ``method`` for an app's network, on the CPU; ``seed`` keys the server's random draws.

    The app's own optimizer takes the place of the plan's. Raises :class:`UsageError` if an app's own training loop
    cannot implement the method, or ``model`` lacks the method's surgery.
    """
    check_arguments(method, model)
    choices, surgery = _list_choices_in_the_loop(method), ", ".join(map(str, method.surgery)) or "none"
    _refuse(choices, method, f"sets {choices}, which is not possible around an app's own training loop: {ELSEWHERE}")
    differ = f"and the model differ in surgery (the method's: {surgery}): let server and clients make the model by"
    _refuse(
        getattr(model, MARK, ()) != method.surgery, method, f"{differ} fedshift.flower.prepare_model(method, model)"
    )
    plan = prepare(replace(method, surgery=()), copy.deepcopy(model).cpu(), optimizer=SGD(lr=1.0), seed=seed)
    _refuse(not plan.sent, method, "sends nothing, for which no server is needed: choose another method")
    mix = "sends each client its own mix of uploads, and a Flower node that restarts has another number"
    _refuse(plan.mixes, method, f"{mix}: {ELSEWHERE}")
    tied = sorted(model.state_dict().keys() - plan.initial.keys())
    twice = f"would send {tied[:1]} twice or never, which is a second name of another entry, or no tensor"
    _refuse(tied, method, f"{twice}: give each tensor one name in the state_dict, or {ELSEWHERE}")
    return plan


def _refuse(wrong: object, method: Method, why: str) -> None:
    if wrong:
        raise UsageError(f"method {method.label!r} {why}")


def check_arguments(method: object, model: object) -> None:
    """Raise :class:`UsageError` unless these are a method and a network."""
    if not isinstance(method, Method):
        raise UsageError(f"the method is {method!r}: give an expression, such as fedshift.fedbn(fedshift.fedadam())")
    if not isinstance(model, nn.Module):
        raise UsageError(f"the model is {model!r}: give the app's torch.nn.Module, such as Net()")


def take_single(records: Mapping[str, T], what: str) -> tuple[str, T]:
    """Return the key and the value of the only record; raise :class:`RefusedMessage` if there are more, or none."""
    if len(records) != 1:
        raise RefusedMessage(f"{what} holds {len(records)} records in place of one")
    return next(iter(records.items()))


def _list_choices_in_the_loop(method: Method) -> str:
    """Return every choice that differs from FedAvg's and is made in the training loop, with its value."""
    others = tuple(rule for rule in method.rules if not (isinstance(rule, IN_ANY_LOOP) or _acts_on_the_server(rule)))
    chosen, usual = vars(replace(method, rules=others)), vars(Method())
    choices = {name: value for name, value in chosen.items() if name not in OUTSIDE and value != usual[name]}
    if others:
        choices["rules"] = ", ".join(rule.source_method for rule in others)
    if method.scope.begin is not nothing:
        choices["scope.begin"] = method.scope.begin
    return ", ".join(f"{name} = {value}" for name, value in choices.items())


def _acts_on_the_server(rule: Rule) -> bool:
    """Return whether a rule only changes the aggregation, and needs no numbers of local steps, which no app sends."""
    folds = (rule.aggregates or rule.moves) and not isinstance(rule, NormalizedAveraging)
    return folds and all(getattr(type(rule), hook) is getattr(Rule, hook) for hook in HOOKS if hook != "fold")
