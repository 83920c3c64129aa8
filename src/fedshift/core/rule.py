"""Rules: changes of local training and of the server, beyond averaging, and what their hooks read.

In: a network to which :meth:`Rule.bind` resolves a rule, and views of a client's round (:class:`Client`), of one of its
steps (:class:`Step`) and of the server's round (:class:`Server`). Out: a :class:`Declared` that tells all other parts
what the rule keeps, trains, reads and sends, and what its hooks return. Information that costs or reveals something is
refused unless the rule declares that it reads it.

A method holds a tuple of rules, at most one per type; each hook receives the value that the previous rule returned.
Gradients pass through three stages, independent of the order of composition: terms of the client's objective (FedProx,
equation 2; FedDyn, Algorithm 1), transformations of the objective's gradient (AGC, whose equation 4 bounds an update by
the weights), and corrections of the step (SCAFFOLD, Algorithm 1, whose control variates are means of the gradients that
they correct). In a stage, rules act in the order of their names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import KW_ONLY, Field, dataclass, field, is_dataclass
from difflib import get_close_matches
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple, Self, dataclass_transform, get_args

import torch
from torch import Tensor, nn

from ..nn.dropout import derive_key, dropout_key
from ..nn.recognition import placed_hooks
from ..utils.errors import UsageError, unknown_name
from ..utils.state import State as State
from ..utils.state import clone
from .declarations import Phase as Phase
from .declarations import Send as Send
from .means import weighted_mean
from .network import Network as Network
from .network import compute_features, forward
from .states import LocalTrainingState, SamplesBeforeWork, ServerState, Update

HOOKS = ("start", "personalize", "batch", "outputs", "loss", "combine_samples", "gradients", "end", "fold")
"""The hooks that act; :meth:`Rule.bind` declares."""
GradientStage = Literal["objective", "transform", "step"]
GRADIENT_STAGES: tuple[GradientStage, ...] = get_args(GradientStage)


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Rule:
    """Base class of rules, which changes nothing; a subclass without ``__init__`` is a frozen dataclass by itself.

    ``personalize``, ``batch``, ``loss`` and ``gradients`` run under ``torch.vmap`` and are recorded: they must not
    branch on values of tensors. All hooks are pure, except that ``loss`` may write into :attr:`Declared.buffers`.
    Attributes ``needs_...`` are reasons, with which refusals begin; empty: the rule needs nothing of this kind.

    Attributes:
        needs_shared: A use of parameters that clients load and train.
        needs_several_steps: Why a round of one step from the loaded values does nothing, for a notice.
        needs_plain_steps: A claim that holds only if each local step moves every parameter along its gradient, starting
            from the loaded values, by SGD without momentum.
        allows_momentum: ``needs_plain_steps`` allows momentum that is reset each round.
        needs_entries_only: Why clients must send only the model's entries, and no rule may read those of single
            clients.
        needs_mean: A use of the mean of uploads, which no rule must replace.
        needs_classes: A use of classes, of which each sample must have one.
        needs_one_input: A use of samples, which must be one array, such as an image.
        personalizes: ``use``: a client evaluates the result of :meth:`personalize` instead of the entries that it loads
            and keeps; ``start``: local work starts from that model, too.
        buffers_alone: Whether :meth:`personalize` changes only buffers, so that parameters start from the loaded
            values.
        gradient_stage: What :meth:`gradients` does: ``objective``: it adds the gradient of a term of the client's
            objective; ``transform``: it transforms that objective's gradient; ``step``: it corrects the result.
        on_copies: Whether :meth:`gradients` is also called, separately, for each rule's :attr:`Declared.model`.
        aggregates: Whether :meth:`fold` makes the server's entries from single uploads, in place of their mean.
        moves: Whether :meth:`fold`, the last one, moves the trained entries that clients load on, along their change.
        weighs: Whether entries of a rule that ``aggregates`` depend on the clients' weights.
        passes_on: Whether a rule that ``aggregates`` may send clients entries exactly as another sent them. Sites are
            informed of this, and of ``keeps`` and ``mixes``.
        keeps: Whether the server keeps state about single clients (:attr:`Folded.kept`).
        mixes: Whether clients load mixes of the round's uploads (:attr:`Folded.mixes`).
        secret: Whether random draws of :meth:`combine_samples` come from the operating system, so that engines must not
            record or share them.

    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    needs_shared: ClassVar[str] = ""
    needs_several_steps: ClassVar[str] = ""
    needs_plain_steps: ClassVar[str] = ""
    allows_momentum: ClassVar[bool] = False
    needs_entries_only: ClassVar[str] = ""
    needs_mean: ClassVar[str] = ""
    needs_classes: ClassVar[str] = ""
    needs_one_input: ClassVar[str] = ""
    personalizes: ClassVar[Literal["", "use", "start"]] = ""
    buffers_alone: ClassVar[bool] = False
    gradient_stage: ClassVar[GradientStage] = "transform"
    on_copies: ClassVar[bool] = False
    aggregates: ClassVar[bool] = False
    moves: ClassVar[bool] = False
    weighs: ClassVar[bool] = True
    passes_on: ClassVar[bool] = True
    keeps: ClassVar[bool] = False
    mixes: ClassVar[bool] = False
    secret: bool = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for parent in cls.__mro__[:0:-1]:
            _make_dataclass(parent)
        if cls.gradient_stage not in GRADIENT_STAGES:
            raise unknown_name(f"gradient_stage of {cls.__name__}", cls.gradient_stage, GRADIENT_STAGES)
        for name in vars(cls).keys() - vars(Rule).keys():
            if callable(getattr(cls, name)) and (near := get_close_matches(name, HOOKS, n=1, cutoff=0.8)):
                raise UsageError(
                    f"{cls.__name__}.{name}() is not a hook, so nothing calls it: did you mean {near[0]}()?"
                )
        if (cls.personalize is not Rule.personalize) != bool(cls.personalizes):
            raise UsageError(
                f"{cls.__name__}: personalize() and the class attribute personalizes ('use' or 'start') go together: "
                "give both or neither"
            )

    def __new__(cls, *_: object, **__: object) -> Self:  # noqa: D102
        _make_dataclass(cls)
        return super().__new__(cls)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    @property
    def source_method(self) -> str:
        """Name of the method that composed the rule, once it is bound; before, of fedshift's method or the class."""
        package, _, module = type(self).__module__.rpartition(".")
        return str(vars(self).get("_source", module if package == "fedshift.methods" else type(self).__name__))

    def named(self, source: str) -> Self:
        """Return a copy of the rule with ``source`` as its :attr:`source_method`."""
        rule = copy(self)
        vars(rule)["_source"] = source
        return rule

    @property
    def min_clients(self) -> int:
        """Minimum number of clients in a round."""
        return 1

    def bind(self, network: Network) -> Declared:
        """Return the rule resolved against a network, with its declarations.

        Raise :class:`UsageError`, without the method's name, to refuse the network.
        """
        return Declared(self)

    def start(self, client: Client) -> State:
        """Return the client's memory for the round, before local work.

        Additional entries, not in :attr:`Declared.memory`, last until :meth:`end`.
        """
        return client.memory

    def personalize(self, state: State, client: Client) -> State:
        """Return the client's model, given its loaded and personal entries."""
        return state

    def batch(self, x: Tensor, y: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        """Return the batch to train on, in the shapes of ``x [B, ...]`` and ``y [B, ...]``."""
        return x, y

    def outputs(self, outputs: Tensor, step: Step) -> Tensor:
        """Return the outputs that the training loss reads, in the shape of ``outputs``, such as calibrated logits.

        They also pass through here in :meth:`Step.loss_at`; evaluation reads the network's.
        """
        return outputs

    def loss(self, loss: Tensor, step: Step) -> Tensor:
        """Return the training objective (scalar), given the loss on the batch or the previous rule's objective.

        It must depend on ``loss``; to change what the loss is computed from, define :meth:`outputs`.
        """
        return loss

    def combine_samples(self, samples: Iterable[State], key: Tensor) -> State:
        """Return the gradients of a batch, from chunks of its samples', ``[samples, ...]``, before other hooks.

        ``key``: int64 scalar that keys random draws. Without a rule that defines it, they are the mean over samples.
        """
        raise NotImplementedError

    def gradients(self, grads: State, step: Step) -> State:
        """Return the gradients for the optimizer, by name of the model's trained entries.

        For a copy (:attr:`on_copies`), names are the model's, too, and ``step.loaded`` is empty.
        """
        return grads

    def end(self, client: Client) -> tuple[State, State]:
        """Return the client's memory after local work, and its upload: exactly :attr:`Declared.sends`."""
        return client.memory, {}

    def fold(self, server: Server) -> Folded:
        """Return the server's result of a round: the rule's state there, and new entries.

        Entries are all that clients send if the rule ``aggregates``, the trained ones that clients load if it
        ``moves`` them, otherwise :attr:`Declared.sets`.
        """
        return Folded(server.memory, kept=server.kept)


def _make_dataclass(cls: type) -> None:
    """Make a subclass of :class:`Rule` a frozen dataclass, unless it was decorated or has an ``__init__``."""
    made = vars(cls).keys() & {"__dataclass_params__", "__init__"} or cls in (Rule, object)
    if not made and issubclass(cls, Rule) and (is_dataclass(cls) or cls.__init__ is object.__init__):
        dataclass(frozen=True)(cls)


@dataclass(frozen=True, eq=False)
class Declared:
    """A rule resolved against a network, and all that it keeps, trains, reads and sends.

    Names of entries are unique across ``model``, ``params``, ``buffers`` and ``memory``.

    Args:
        rule: The rule, configured for the network.
        name: Name of the rule in checkpoints and uploads, which the plan gives it.
        memory: State that each client keeps from round to round and never sends.
        server: State that the server keeps and broadcasts.
        kept: State that stays on the server. If the rule ``keeps`` state about clients, names may be added.
        growing: Axes of entries in ``server`` whose lengths may change between rounds; others and dtypes are fixed.
        model: Weights and buffers of another network, under some or all of the model's names. They are trained and
            decayed like the model, and rules with :attr:`Rule.on_copies` transform their gradients.
        params: Other trained parameters. Without weight decay unless a phase enables it; other rules do not see them.
        limits: Minimum and maximum of ``params``, which are clamped after each step.
        buffers: Entries that are neither trained nor sent; :meth:`Rule.loss` may write into them.
        phases: When parameters are trained.
        sends: Uploads of every client for the rule in each round: exactly the tensors of :meth:`Rule.end`.
        sets: Entries of the server that :meth:`Rule.fold` computes, replacing their aggregate.
        targets: Whether :meth:`Rule.start` reads the targets of all training samples of a client.
        samples_before_work: Number of distinct samples, the first of the round, on which :meth:`Rule.start` runs the
            model. A client that uses fewer in the round provides those.
        features: Name of the layer whose input :meth:`Rule.loss` receives, or ``"last"`` for the last layer with
            parameters, the classifier.
        draws: Whether the rule reads ``step.key`` for random draws.
        entries: Whether :meth:`Rule.fold` receives the entries of each client, and not only their mean.
        notices: Sentences that users should read before the rule runs.

    """

    rule: Rule
    _: KW_ONLY
    name: str = ""
    memory: State = field(default_factory=dict)
    server: State = field(default_factory=dict)
    kept: State = field(default_factory=dict)
    growing: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    model: State = field(default_factory=dict)
    params: State = field(default_factory=dict)
    limits: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    buffers: State = field(default_factory=dict)
    phases: tuple[Phase, ...] = ()
    sends: Mapping[str, Send] = field(default_factory=dict)
    sets: frozenset[str] = frozenset()
    targets: bool = False
    samples_before_work: int = 0
    features: str = ""
    draws: bool = False
    entries: bool = False
    notices: tuple[str, ...] = ()

    @property
    def on_client(self) -> State:
        """All entries that a client keeps for the rule."""
        return {**self.model, **self.params, **self.buffers, **self.memory}

    @cached_property
    def names(self) -> dict[str, str]:
        """Names of the rule's own entries in local training, by their names in the rule."""
        return {entry: f"{self.name}/{entry}" for entry in (*self.model, *self.params, *self.buffers)}


Hook = Callable[[nn.Module, tuple[Tensor, ...]], None]
"""Called with a layer and its inputs, just before the layer runs."""


class Owned(NamedTuple):
    """Current values of the entries that a rule owns on a client; losses differentiate ``model`` and ``params``."""

    model: State
    params: State
    buffers: State


class View:
    """Facts that all hooks on a client read; :class:`Client` and :class:`Step` add others.

    ``loaded``: the model's entries as the server sent them. ``memory`` and ``server``: the rule's memories, on this
    client and as broadcast. ``lr``: the model's learning rate in this round; for stacked clients, a scalar tensor; NaN
    where :meth:`Rule.personalize` makes a model for use, without local work.
    """

    def __init__(self, network: Network, bound: Declared, index: int, job: LocalTrainingState, state: State) -> None:
        self.bound, self._network, self._job, self._state = bound, network, job, state
        self.loaded, self.memory, self.server = job.global_params, job.memory[index], job.server_memory[index]
        self.lr = job.lr

    @cached_property
    def own(self) -> Owned:
        """Current values of the entries that the rule owns."""
        names, parts = self.bound.names, (self.bound.model, self.bound.params, self.bound.buffers)
        return Owned(*({entry: self._state[names[entry]] for entry in part} for part in parts))

    @cached_property
    def params(self) -> State:
        """Trained entries of the network: the model, or in :meth:`Rule.gradients` possibly a copy."""
        return {name: self._state[name] for name in self._network.params}

    @cached_property
    def buffers(self) -> State:
        """The network's other entries, as they were before the step."""
        return {name: self._job.rest[name] for name in self._network.buffers}


def _refuse(bound: Declared, what: str, declaration: str) -> UsageError:
    return UsageError(
        f"{type(bound.rule).__name__} reads {what} without declaring it: return "
        f"Declared(self, {declaration}) from its bind()"
    )


class Client(View):
    """A client's round, before local work or after it.

    ``round``: rounds done before this one. ``steps``: steps taken in it.
    """

    def __init__(
        self, network: Network, bound: Declared, index: int, job: LocalTrainingState, state: State,
        seen: SamplesBeforeWork | None = None,
    ) -> None:  # fmt: skip
        super().__init__(network, bound, index, job, state)
        self.round, self.steps, self._seen = job.round, job.done - job.start, seen

    @property
    def targets(self) -> Tensor:
        """The targets of all training samples, ``[N, ...]``; in :meth:`Rule.start`, with ``targets=True``."""
        return self._see(self.bound.targets, "targets", "targets=True").targets

    @property
    def samples(self) -> int:
        """The number of samples of :meth:`run` and :meth:`loss_at`; all three need ``samples_before_work``."""
        return len(self._first("samples").x)

    def run(self, hooks: Mapping[str, Hook]) -> None:
        """Run the round's initial model once, in training mode and without gradients.

        ``hooks``: callables by layer name (``""``: the network), called with the layer and its inputs. Buffers that
        layers write are discarded.
        """
        first, layers = self._first("run"), dict(self._network.module.named_modules())
        with placed_hooks(layers[name].register_forward_pre_hook(hook) for name, hook in hooks.items()):
            forward(self._network, clone(self._model), first.x, training=True, key=first.key)

    def loss_at(self, entries: State) -> Tensor:
        """Return the mean loss of that model in evaluation mode, with ``entries`` replaced."""
        first = self._first("loss_at")
        outputs = forward(self._network, clone({**self._model, **entries}), first.x, training=False)
        return self._network.loss(outputs, first.y)

    @property
    def _model(self) -> State:
        return {name: self._state[name] for name in self._network.initial}

    def _first(self, what: str) -> SamplesBeforeWork:
        count = self.bound.samples_before_work
        seen = self._see(count, what, "samples_before_work=samples")
        return seen._replace(x=seen.x[:count], y=seen.y[:count])

    def _see(self, declared: object, what: str, declaration: str) -> SamplesBeforeWork:
        if not declared:
            raise _refuse(self.bound, what, declaration)
        if self._seen is None:
            raise UsageError(f"{type(self.bound.rule).__name__} reads {what} outside of start(): read it there")
        return self._seen


class Pass(NamedTuple):
    """A forward pass of a network on a batch, differentiable in the network's parameters.

    ``outputs``: the network's outputs, ``[B, K]`` for classification.
    """

    outputs: Tensor
    read: Mapping[str, Tensor]
    bound: Declared

    @property
    def features(self) -> Tensor:
        """The input of the layer that ``Declared.features`` names."""
        if not self.bound.features:
            raise _refuse(self.bound, "features", "features='last'")
        return self.read[self.bound.name]


class Step(View):
    """A local step.

    ``x``: inputs of the batch, ``[B, ...]``. ``y``: its targets, ``[B, ...]``. ``criterion``: the training loss, a
    function of outputs and targets.
    """

    def __init__(self, batch: Batch, index: int, state: State) -> None:
        super().__init__(batch.network, batch.rules[index], index, batch.job, state)
        self.x, self.y, self.criterion, self._batch = batch.x, batch.y, batch.network.loss, batch

    @property
    def steps(self) -> Tensor:
        """The number of steps taken in the round, an int64 scalar, which a recorded step can vary."""
        return self._job.steps

    @property
    def start(self) -> State:
        """All entries of the client's model when the round began, loaded and kept ones.

        They are constants under every method: ``step.run(step.start, training=False)`` is a teacher.
        """
        return self.loaded | self._job.personal

    @property
    def key(self) -> Tensor:
        """The int64 scalar that keys the step's random draws; needs ``draws=True``."""
        if not self.bound.draws:
            raise _refuse(self.bound, "key", "draws=True")
        return derive_key(self._batch.key, self.bound.name)

    @property
    def outputs(self) -> Tensor:
        """The outputs of the pass that computed the loss; in separate phases, the model runs on demand."""
        return self._batch.passed[0]

    @property
    def features(self) -> Tensor:
        """The input of the layer that ``Declared.features`` names, from the same pass."""
        return Pass(*self._batch.passed, self.bound).features

    def run(self, entries: State, x: Tensor | None = None, *, training: bool = True) -> Pass:
        """Return the forward pass of the model with ``entries``, on the batch or on the inputs ``x``.

        ``entries`` has all trained entries, and may leave out others, which are copied from the model. It is not
        copied: layers write into its buffers, but never into the model's. Dropout uses the masks of the model's pass.
        With ``training=False``, dropout is off, BatchNorm normalizes by its running statistics, and no buffer is
        written. Raises :class:`UsageError` if a trained entry is missing.
        """
        with dropout_key(self._batch.key) if self._network.keyed else nullcontext():
            passed = self._batch.run(entries, self.x if x is None else x, training=training, asker=self.bound)
        return Pass(*passed, self.bound)

    def loss_at(self, entries: State) -> Tensor:
        """Return the loss on the batch of the model with ``entries``, as for :meth:`run`; dropout draws new masks."""
        batch = self._batch
        passed = batch.run(entries, batch.x, asker=self.bound)
        return self.criterion(batch.change_outputs(passed, {**batch.params, **batch.job.rest, **entries}), batch.y)

    def gradient_at(self, params: State) -> State:
        """Return the gradient of :meth:`loss_at` with respect to ``params``, detached."""
        grads = torch.func.grad(self.loss_at)({name: tensor.detach() for name, tensor in params.items()})
        return {name: grad.detach() for name, grad in grads.items()}

    def at(self, params: State, buffers: State | None = None) -> Step:
        """Return this step with other ``params``; with ``buffers``, of another network, which was not loaded."""
        step = copy(self)
        step.params = params
        if buffers is not None:
            step.buffers, step.loaded = buffers, {}
        return step


class Batch:
    """The batch of a step, on which rules run networks; ``params``: where the objective is computed."""

    def __init__(
        self, network: Network, rules: Sequence[Declared], layers: Mapping[str, nn.Module], job: LocalTrainingState,
        params: State, x: Tensor, y: Tensor, key: Tensor,
    ) -> None:  # fmt: skip
        self.network, self.rules, self.layers, self.job = network, rules, layers, job
        self.params, self.x, self.y, self.key = params, x, y, key

    @cached_property
    def passed(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Outputs, and features by rule, of the pass that computed the loss, which runs on demand."""
        with dropout_key(self.key):
            return self.run(self.params, self.x)

    def run(
        self, entries: State, x: Tensor, *, training: bool = True, asker: Declared | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return outputs, and features by rule, under ``entries``, completed by copies of the model's others."""
        if missing := self.network.params.keys() - entries.keys():
            raise UsageError(
                f"{type(asker.rule).__name__ if asker else 'a rule'} runs a model without {min(missing)!r}, which is "
                "trained: give all trained entries: step.start | entries for the client's model when the round began "
                "(a teacher), or step.params | entries for the model in training"
            )
        rest, frozen = self.job.rest, self.job.frozen
        model = {name: entries[name] if name in entries else rest[name].clone() for name in self.network.initial}
        return compute_features(self.network, model, x, self.layers, training=training, frozen=frozen, first=False)

    def change_outputs(self, passed: tuple[Tensor, dict[str, Tensor]], state: State) -> Tensor:
        """Return the outputs of a pass after every rule's :meth:`Rule.outputs`; ``state``: all entries."""
        there = copy(self)
        for index, bound in enumerate(self.rules):
            if type(bound.rule).outputs is not Rule.outputs:
                there.passed = passed
                passed = bound.rule.outputs(passed[0], Step(there, index, state)), passed[1]
        return passed[0]


@dataclass(frozen=True, kw_only=True, eq=False)
class Received:
    """The upload of one ``client`` in a round, as the server received it; sequences are sorted by client name.

    ``weight``: the client's weight among the participants, by the method's weighting; weights sum to one. ``size``:
    number of training samples; 1 where clients count equally. ``share``: fraction of the sizes of all clients that
    train, with or without an upload in the round. ``withheld``: whether :attr:`entries` is refused, because only the
    sum over clients is needed.
    """

    client: str
    update: Update
    weight: float
    size: float
    share: float
    withheld: bool = False

    @property
    def entries(self) -> State:
        """The entries of the model that the client sent; a rule needs ``Declared(self, entries=True)``."""
        if self.withheld:
            raise UsageError(
                "a rule's fold() reads the entries of single clients, without declaring it: return "
                "Declared(self, entries=True) from its bind()"
            )
        return self.update.shared


@dataclass(frozen=True, kw_only=True, eq=False)
class Server:
    """The server after a round, and ``before`` it.

    ``memory`` and ``kept``: the rule's states on the server; ``kept`` is not sent. ``uploads``: tensors that
    clients sent for the rule, in the order of their names. ``received``: all uploads, in the same order.
    """

    memory: State
    kept: State
    uploads: Sequence[State]
    received: Sequence[Received]
    before: ServerState
    network: Network
    rules: Sequence[Declared]
    _entries: State | None = None

    @property
    def entries(self) -> State:
        """The entries after the folds before this one; at first, their mean by the clients' weights."""
        return average(self.received) if self._entries is None else self._entries

    @property
    def changes(self) -> State:
        """Change of :attr:`entries` in the round, of the trained ones that clients load."""
        names, entries = self.network.trained & self.network.loaded, self.entries
        return {name: entries[name] - before for name, before in self.before.shared.items() if name in names}


def average(received: Sequence[Received]) -> State:
    """Return the mean of the uploads by the clients' weights."""
    return weighted_mean([each.entries for each in received], [each.weight for each in received])


@dataclass(frozen=True, eq=False)
class Folded:
    """Result of a fold: the rule's states on the server, and the server's ``entries`` that the rule makes.

    ``mixes``: weights of the round's uploads by client and entry (:class:`~fedshift.core.mixes.Mixes`), for clients
    that load a mix.
    """

    memory: State = field(default_factory=dict)
    entries: State = field(default_factory=dict)
    kept: State = field(default_factory=dict)
    mixes: Mapping[str, State] = field(default_factory=dict)
