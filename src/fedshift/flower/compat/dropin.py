"""Methods for Flower apps with their own training loop; methods that such a loop cannot implement are refused.

Scope, surgery, aggregation and server optimizer work outside the training loop. Rules, local work and frozen statistics
are part of the loop, so methods that use any of these are refused. The exception is rules that only change gradients,
which need one line in any loop.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ...core.contexts import Owned, StepContext
from ...core.method import Method
from ...core.optimizer import SGD
from ...core.plan import Plan
from ...core.preparation import apply_surgery, prepare
from ...core.rule import Rule
from ...core.selection import everything, nothing
from ...methods.agc import Clipping
from ...methods.fednova import NormalizedAveraging
from ...methods.fedprox import Proximal
from ...utils.errors import UsageError
from ...utils.state import State

DONE, LAST = "fedshift-rounds-done", "fedshift-last-round"
"""Keys in a message's configuration: rounds done by the server, and the last round of this node (0: none)."""
MARK = "_fedshift_surgery"
IN_ANY_LOOP = (Clipping, Proximal)
"""Rules that only change gradients, for :func:`transform_gradients_`."""
_BOUND: WeakKeyDictionary[nn.Module, tuple[Method, Plan]] = WeakKeyDictionary()
"""The method whose gradients a network last followed, and its plan."""


def prepare_model(method: Method, model: nn.Module) -> nn.Module:
    """Return a copy of ``model`` after the method's surgery; an app's server and all its clients must use this network.

    Surgery draws new weights from torch's generator. Raises :class:`UsageError` if surgery does not fit the network.
    """
    changed = apply_surgery(method, model)
    setattr(changed, MARK, method.surgery)
    return changed


@torch.no_grad()
def transform_gradients_(method: Method, model: nn.Module, received: State | None = None) -> None:
    """Change the gradients of ``model`` as ``method`` does: FedProx's proximal term, adaptive gradient clipping.

    Call it between ``loss.backward()`` and ``optimizer.step()``. It changes nothing for methods without these rules.

    Args:
        method: the method.
        model: the network in training.
        received: copies of its parameters before training, by name; FedProx keeps parameters close to these.

    Raises:
        UsageError: if the method needs ``received`` and it is missing, shares memory with the model, or lacks a
            parameter.

    """
    if not any(isinstance(rule, IN_ANY_LOOP) for rule in method.rules):
        return
    made, plan = _BOUND.get(model, (None, None))
    if plan is None or made != method:
        plan = _prepare(method, model)
        _BOUND[model] = method, plan
    params: State = {name: param for name, param in model.named_parameters() if param.grad is not None}
    grads = {name: param.grad for name, param in params.items() if param.grad is not None}
    for bound in plan.rules:
        if not isinstance(bound.rule, IN_ANY_LOOP):
            continue
        near: State = {}
        if bound.rule.requires.shared_entries:
            near = _check_received(bound.rule, params, received, plan.loaded)
        zero = torch.zeros((), dtype=torch.int64)
        context = StepContext(
            bound=bound, loaded=near, memory={}, own=Owned({}, {}, {}), server={}, lr=plan.optimizer.lr, params=params,
            buffers={}, steps=zero, _round=0, _key=zero,
        )  # fmt: skip
        grads = bound.rule.gradients(grads, context)
    for name, param in params.items():
        param.grad = grads[name]


def _check_received(rule: Rule, params: State, received: State | None, loaded: frozenset[str]) -> State:
    how = "before training, received = {name: param.detach().clone() for name, param in model.named_parameters()}"
    if received is None:
        raise UsageError(f"{rule.source_method} needs the parameters that the client received: give received=, {how}")
    for name in params:
        if name not in received:
            raise UsageError(f"received lacks the parameter {name!r} of the model: {how}")
        if received[name].data_ptr() == params[name].data_ptr():
            raise UsageError(f"received holds the model's own {name!r}, which training changes: copy it; {how}")
    return {name: tensor for name, tensor in received.items() if name in loaded}


def resolve_plan(method: Method, model: nn.Module, seed: int = 0) -> Plan:
    """Return the plan of ``method`` for an app's network, on the CPU; ``seed`` keys the server's random draws.

    Raises :class:`UsageError` if an app's own training loop cannot implement the method, or ``model`` lacks the
    method's surgery.
    """
    _refuse_rules_of_training(method)
    if getattr(model, MARK, ()) != method.surgery:
        wanted = ", ".join(map(str, method.surgery)) or "none"
        raise UsageError(
            f"method {method.label!r} and the model differ in surgery (the method's: {wanted}): make the model by "
            "fedshift.flower.prepare_model(method, model) with this method, on the server and on all clients"
        )
    plan = _prepare(method, model, seed)
    if not plan.sent:
        raise UsageError(f"method {method.label!r} sends nothing, for which no server is needed: choose another method")
    if tied := model.state_dict().keys() - plan.initial.keys():
        raise UsageError(
            f"entry {min(tied)!r} of the model is a second name of another, or is not a tensor, so that it would be "
            "sent twice or never: give each tensor one name in the state_dict, or use `fedshift serve`"
        )
    return plan


def _prepare(method: Method, model: nn.Module, seed: int = 0) -> Plan:
    """Return the plan of ``method`` for a network after its surgery; the app's own optimizer takes the plan's place."""
    return prepare(replace(method, surgery=()), copy.deepcopy(model).cpu(), optimizer=SGD(lr=1.0), seed=seed)


def _refuse_rules_of_training(method: Method) -> None:
    parts = {
        "changes the training loop by a rule": [
            r.source_method for r in method.rules if not isinstance(r, IN_ANY_LOOP)
        ],
        "combines the gradients of samples": [method.gradient.source_method] if method.gradient else [],
        "leaves parameters untrained": [str(method.trains)] if method.trains is not everything else [],
        "fine-tunes models for use": [f"for {method.finetune} rounds"] if method.finetune else [],
        "freezes statistics in training": [str(method.freeze)] if method.freeze else [],
        "starts a client's first round from other entries": [str(method.scope.begin)]
        if method.scope.begin is not nothing
        else [],
        "sets the local work": [f"{name}={value}" for name, value in method.work.items()],
        "sets the local optimizer": [f"{name}={value}" for name, value in method.optimizer.items()],
        "trains on all data in one place": ["pooled"] if method.pooled else [],
        "counts local steps": ["fednova"] if isinstance(method.aggregate, NormalizedAveraging) else [],
    }
    for what, found in parts.items():
        if found:
            raise UsageError(
                f"method {method.label!r} {what} ({', '.join(found)}), which is not possible in an app's "
                "training loop: run it by `fedshift serve` and `fedshift join`, or leave that part out"
            )
