"""Plans: a method resolved against one model, once and before anything starts.

``prepare`` makes a stateless template of the model, names its entries, decides which are loaded, sent and trained, and
tries the template on one sample; whatever does not fit is refused here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..base.errors import UsageError
from ..base.state import State, clone
from ..nn.dropout import dropout_key, key_dropouts
from .method import Method
from .optimizer import Optimizer
from .select import Entry, entries
from .work import Work

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """A method resolved against one model: which entries do what. Made by :func:`prepare`.

    ``module`` is a stateless template; ``initial`` the state that server and clients start from; ``loaded``, ``sent``
    and ``trained`` are sets of entry names; ``smallest_batch`` is 2 where the model cannot train on one sample.
    """

    method: Method
    module: nn.Module
    entries: tuple[Entry, ...]
    initial: State
    loaded: frozenset[str]
    sent: frozenset[str]
    trained: frozenset[str]
    work: Work
    optimizer: Optimizer
    loss: Loss
    smallest_batch: int

    @property
    def personal(self) -> frozenset[str]:
        """Entries that a client keeps from round to round instead of loading them."""
        return frozenset(self.initial) - self.loaded

    @property
    def has_global(self) -> bool:
        """Whether the server holds a whole model (FedBN's does not)."""
        return self.sent == frozenset(self.initial)

    @property
    def dtype(self) -> torch.dtype:
        """Floating-point type of the model, in which it wants its inputs."""
        return next((t.dtype for t in self.initial.values() if t.is_floating_point()), torch.float32)

    def rule_memory(self, index: int) -> str:
        """Prefix under which the rule at ``index`` keeps its memories, so that chained rules never meet."""
        return f"{index}.{type(self.method.rules[index]).__name__.lower()}"


def prepare(
    method: Method,
    model: nn.Module,
    *,
    work: Work | None = None,
    optimizer: Optimizer | None = None,
    loss: Loss = nn.functional.cross_entropy,
    sample: Tensor | None = None,
) -> Plan:
    """Resolve ``method`` against ``model``.

    ``loss(outputs, labels)`` is the mean over a batch. ``sample``: inputs ``[1, ...]`` of one sample, with which the
    model is tried once. ``work`` and ``optimizer`` serve methods that bring none of their own. Raises
    :class:`UsageError` where the scope matches nothing, loads what nobody sends, or the model refuses the sample.
    """
    chosen_work, chosen_optimizer = method.work or work or Work(epochs=1), method.optimizer or optimizer
    if chosen_optimizer is None:
        raise UsageError(f"method {method.name!r} has no optimizer: pass one, for example SGD(lr=0.01)")
    template = key_dropouts(model)
    found = entries(template)
    tensors = dict(template.named_parameters()) | dict(template.named_buffers())
    initial = {entry.name: tensors[entry.name].detach().clone() for entry in found}
    loaded, sent = method.scope.load.names(found), method.scope.send.names(found)
    if loaded - sent:
        raise UsageError(
            f"method {method.name!r} loads {min(loaded - sent)!r}, which no client sends: "
            "the server would hand out its first value for ever; send it too, or do not load it"
        )
    if method.pooled and loaded != frozenset(initial):
        raise UsageError(
            f"method {method.name!r} pools all data but keeps entries on clients, of which pooling leaves none: "
            "use centralized without a personal method"
        )
    trained = frozenset(name for name in initial if tensors[name].requires_grad)
    for rule in method.rules:
        trained = rule.trainable(trained)
    if not trained:
        raise UsageError(f"method {method.name!r} trains no parameter of the model: leave some requires_grad=True")
    plan = Plan(
        method=method, module=template, entries=found, initial=initial, loaded=loaded, sent=sent, trained=trained,
        work=chosen_work, optimizer=chosen_optimizer, loss=loss, smallest_batch=1,
    )  # fmt: skip
    plan = replace(plan, smallest_batch=_smallest_batch(plan, sample)) if sample is not None else plan
    if chosen_work.batch_size is not None and chosen_work.batch_size < plan.smallest_batch:
        raise UsageError(
            "batch_size=1, but batch normalization in this model has no variance over one sample: use a batch size of "
            "2 or more, or a model without BatchNorm"
        )
    return plan


def _smallest_batch(plan: Plan, sample: Tensor) -> int:
    """1, or 2 where the model refuses to train on one sample, as BatchNorm does on one value a channel."""
    inputs = sample.to(plan.dtype)
    for size in (1, 2):
        try:
            forward(plan, clone(plan.initial), inputs.expand(size, *sample.shape[1:]), training=True)
        except ValueError as error:
            if size == 2 or "more than 1 value per channel" not in str(error):
                raise UsageError(_refused(sample, error)) from error
        except (RuntimeError, TypeError) as error:
            raise UsageError(_refused(sample, error)) from error
        else:
            return size
    raise AssertionError("unreachable")


def _refused(sample: Tensor, error: Exception) -> str:
    return (
        f"the model refuses a sample of shape {tuple(sample.shape[1:])}: {error}. "
        "Choose a model for this shape, or bring the data to the model's (for images: size, channels)"
    )


@torch.no_grad()
def forward(plan: Plan, state: State, x: Tensor, *, training: bool = False) -> Tensor:
    """Outputs of the model under ``state`` for inputs ``x``; in training mode BatchNorm updates ``state`` in place."""
    plan.module.train(training)
    with dropout_key(torch.zeros((), dtype=torch.int64, device=x.device)):
        outputs: Tensor = functional_call(plan.module, {**state, **scratch(plan.module)}, (x,))
    return outputs


def scratch(module: nn.Module) -> State:
    """Copies of the non-persistent buffers, so that no client's forward pass can write into the template."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer.clone()
        for prefix, owner in module.named_modules()
        for name in owner._non_persistent_buffers_set
        if (buffer := owner._buffers.get(name)) is not None
    }
