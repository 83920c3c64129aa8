"""Rules: what a method changes inside local training and at the server, beyond averaging.

Every hook is a no-op that a method overrides. Rules chain: a method holds a tuple of them, each receives the value that
the one before returned, and each has its own memories and extra entries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple, Protocol, Self

import torch
from torch import Tensor, nn

from ..nn.linear import use_torch_func
from ..utils.state import State, clone
from .declarations import PlannedEntries, Send
from .requirements import Requirements
from .selection import Entry

Hook = Callable[[nn.Module, tuple[Tensor, ...]], None]
"""Called with a layer and its inputs, just before the layer is."""


class ForwardPass(NamedTuple):
    """A model's pass on a batch of local training, differentiable in the model's parameters.

    Attributes:
        x: Inputs ``[B, ...]``.
        y: Targets ``[B, ...]``.
        outputs: The model's outputs, for classes ``[B, K]``.
        features: Input of the layer that the rule names (:attr:`Rule.features`); None where it names none.

    """

    x: Tensor
    y: Tensor
    outputs: Tensor
    features: Tensor | None


class RunModel(Protocol):
    """A function that runs the model on the batch of a step, or on other inputs for the same targets."""

    def __call__(self, state: State, x: Tensor | None = None, /, *, training: bool = True) -> ForwardPass:
        """Return the pass of the model with the entries ``state`` on ``x``; None: the batch's inputs."""


@dataclass(frozen=True, kw_only=True)
class RuleContext:
    """State that a rule may read while a client works.

    Args:
        global_params: The entries as loaded from the server this round.
        memory: The rule's memory on this client.
        extra_entries: The rule's own entries (:meth:`Rule.extra_entries`).
        server_memory: The rule's memory on the server, as broadcast.
        rest: Current entries of the model beside the trained parameters.
        lr: Learning rate of the round.
        steps: Local steps done this round.
        planned_steps: Local steps that the round will have; 0 unless the rule requires a ``step_budget``.
        key: Int64 scalar that keys the draws of a step.
        forward_pass: The model's pass on the batch, from which the loss comes; inside :meth:`Rule.transform_loss` only,
            and None in steps that train the rules' own parameters apart (:attr:`Rule.epochs`).
        run_model: Returns the pass on the same batch, or on other inputs for its targets, of a model with the given
            entries, all of a model's, with the dropout masks of ``forward_pass``; writes BatchNorm's statistics into
            the entries. With ``training=False`` there is no dropout, BatchNorm normalizes by its running statistics,
            and nothing is written. Inside :meth:`Rule.transform_loss` only.
        criterion: The training loss, of outputs and targets; inside :meth:`Rule.transform_loss` only.
        data_loss: Returns the loss on the batch of a model with the given entries; inside
            :meth:`Rule.transform_loss` only.

    """

    global_params: State
    memory: State = field(default_factory=dict)
    extra_entries: State = field(default_factory=dict)
    server_memory: State = field(default_factory=dict)
    rest: State = field(default_factory=dict)
    lr: float = 0.0
    steps: int = 0
    planned_steps: int = 0
    key: Tensor | None = None
    forward_pass: ForwardPass | None = None
    run_model: RunModel | None = None
    criterion: Callable[[Tensor, Tensor], Tensor] | None = None
    data_loss: Callable[[State], Tensor] | None = None

    def data_gradient(self, params: State) -> State:
        """Return the gradient of the loss on the batch in ``params``, as constants; inside ``transform_loss`` only.

        What layers write is not kept.
        """

        def evaluate(state: State) -> Tensor:
            assert self.data_loss is not None
            return self.data_loss({**clone(self.rest), **state})

        with use_torch_func():
            grads = torch.func.grad(evaluate)({name: tensor.detach() for name, tensor in params.items()})
        return {name: grad.detach() for name, grad in grads.items()}


class Rule:
    """The rule that changes nothing.

    Hooks are pure, where they do not say otherwise: they return new values and modify none of their arguments.

    Attributes:
        personalizes: Clients use another model than the one they load (:meth:`personal_model`).
        lr_scale: Learning rate of the rule's own parameters, relative to that of the model's.
        decays: The optimizer's weight decay acts on the rule's own parameters, too; on those of another network
            (:meth:`find_network`) it does in any case.
        on_copies: :meth:`transform_grads` is called for each rule's network, too, by itself: for a rule that treats any
            network alike.
        epochs: Passes of a round over the client's data that train the rule's own parameters separately, after the
            model's; None: both are trained on the same batches.
        leads: These passes come before the model's, which then starts anew from what :meth:`init_local` makes of them.
        finetune_rounds: Rounds of local work, of all parameters, that make of the model which a client loads the one
            that it uses, whenever that is measured or handed out; they leave the federation as it is.
        features: Layer whose input the rule reads, by its name in the network, or ``"last"`` for the last layer with
            parameters, so that features are what the classifier sees; empty: none. They come from the same forward
            pass as the loss.
        observes: Different samples of a round, its first ones, on which the rule sees the model run before local work
            (:meth:`observe`); 0: none.
        growing: Axes of entries of the server's memory whose lengths change from round to round; all other lengths, and
            all types, stay what they are at the start.
        secret: Draws come from the operating system, so that no engine may record or share them.
        requires: What the rest of the method must be like; checked before anything starts.

    """

    personalizes: bool = False
    lr_scale: float = 1.0
    decays: bool = False
    on_copies: bool = False
    epochs: int | None = None
    leads: bool = False
    finetune_rounds: int = 0
    features: str = ""
    observes: int = 0
    growing: Mapping[str, tuple[int, ...]] = MappingProxyType({})
    secret: bool = False
    requires: Requirements = Requirements()

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    @property
    def source_method(self) -> str:
        """Name of the method that brings the rule, used in messages: its module."""
        return type(self).__module__.rpartition(".")[2]

    def bind(self, entries: tuple[Entry, ...]) -> Self:
        """Return the rule for a model with these entries."""
        return self

    def sends(self, plan: PlannedEntries) -> Mapping[str, Send]:
        """Return what every client uploads for the rule in each round: exactly the tensors of :meth:`finalize`.

        An upload that differs in names, shapes or types is refused. ``plan``: what the model's entries are, and which
        of them clients load, send and train.
        """
        return {}

    def client_memory(self, params: State, rest: State) -> State:
        """Return the memory that every client starts with, given the model's trained and other entries.

        It never leaves the client.
        """
        return {}

    def read_targets(self, memory: State, targets: Tensor) -> State:
        """Return the client's memory as a round begins, given the targets ``[N, ...]`` of all its training samples.

        The entries, their shapes and types are those of :meth:`client_memory`.
        """
        return memory

    def observe(self, memory: State, samples: int, run: Callable[[Mapping[str, Hook]], None]) -> State:
        """Return the rule's memory for the round, having seen the model run that local work starts from.

        Entries beside those of :meth:`client_memory` last until :meth:`finalize`.

        Args:
            memory: The rule's memory on the client as the round begins.
            samples: Samples of the run: :attr:`observes`, or all that the client uses in the round if these are fewer.
            run: Runs the model once in training mode, without a gradient, and calls each hook with the layer that it
                names and the layer's inputs; keeps nothing that layers write.

        """
        return memory

    def server_memory(self, initial: State) -> State:
        """Return the memory that the server starts with and broadcasts; ``initial``: trained, loaded parameters."""
        return {}

    def extra_entries(self, params: State, rest: State) -> tuple[State, State]:
        """Return entries that every client holds for the rule: parameters that the optimizer trains too, and others."""
        return {}, {}

    def find_network(self, params: Iterable[str]) -> Mapping[str, str]:
        """Return those of the rule's own parameters that are another network's weights.

        They are given by their names among ``params``, with the model's entries that they stand for. Weight decay and
        rules with :attr:`on_copies` treat them as they treat the model's; other own parameters are no network's.
        """
        return {}

    def trainable(self, names: frozenset[str]) -> frozenset[str]:
        """Return which of the parameters ``names`` the optimizer changes."""
        return names

    def init_local(self, state: State, context: RuleContext) -> State:
        """Return the entries from which the client's local work starts, given those that it loads and keeps."""
        return state

    def personal_model(self, state: State, context: RuleContext) -> State:
        """Return the model that the client would use, given the entries that it loads and keeps."""
        return self.init_local(state, context)

    def trainable_at_step(self, names: frozenset[str], context: RuleContext) -> frozenset[str]:
        """Return which of the trained parameters ``names`` the coming step changes."""
        return names

    def transform_loss(self, loss: Tensor, params: State, context: RuleContext) -> Tensor:
        """Return the objective (scalar) that is differentiated, given the loss on the batch.

        A rule may write in place into those of its extra entries that are not trained, as BatchNorm writes its
        statistics in a forward pass; not into its parameters.
        """
        return loss

    def combine_samples(self, parts: Iterable[State], context: RuleContext) -> State:
        """Return a batch's gradients, given those of its samples: ``[samples, ...]``, some samples in each part.

        A rule that overrides this has the gradients of every batch computed sample by sample, before any rule's
        :meth:`transform_grads`. It must require ``separate_samples``.
        """
        raise NotImplementedError

    def transform_grads(self, grads: State, params: State, context: RuleContext) -> State:
        """Return the gradients that the optimizer receives: those of the model's trained entries, by their names.

        For another rule's network (:attr:`on_copies`) they have the names of the entries that these stand for, and
        ``context.global_params`` is empty.
        """
        return grads

    def restrict_(self, extra_entries: State) -> None:
        """Put the rule's own entries back to where they may be, in place, just after the optimizer's step on them.

        Values of several clients may be stacked in front of a parameter's shape.
        """

    def finalize(self, params: State, context: RuleContext) -> tuple[State, State]:
        """Return the client's new memory after local work, and what it uploads: exactly what :meth:`sends` declares."""
        return context.memory, {}

    def aggregate_memory(self, memory: State, uploads: Sequence[State], shares: Sequence[float]) -> State:
        """Return the server's new memory from the clients' uploads, in client order.

        ``shares``: each uploading client's share of the weight of all clients that train, by the method's weighting.
        They sum to one where all take part, and to less where some do not.
        """
        return memory

    def aggregate_entries(self, previous: State, uploads: Sequence[State]) -> State:
        """Return those of the server's entries that follow from what clients upload for the rule, in client order.

        They take the place of these entries' aggregate. ``previous``: the server's entries before the round.
        """
        return {}

    def notices(self, method: str, batch_size: int | None, params: State) -> Iterator[str]:
        """Yield what users should know before the rule runs, one sentence each.

        Args:
            method: Name of the method that the rule is part of.
            batch_size: Samples of a batch; None: all of a client's.
            params: The parameters that are trained, at their initial values.

        """
        yield from ()
