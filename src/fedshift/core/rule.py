"""Rules: changes of local training and of the server, beyond averaging.

A rule declares its state, trained parameters, reads and uploads in :meth:`Rule.bind`, and acts in the other hooks,
which do nothing by default. A method holds a tuple of rules, at most one per type; each hook receives the value that
the previous rule returned. Gradients pass through three stages, independent of the order of composition: terms of the
client's objective (FedProx, equation 2; FedDyn, Algorithm 1), transformations of the objective's gradient (AGC, whose
equation 4 bounds an update by the weights), and corrections of the step (SCAFFOLD, Algorithm 1, whose control variates
are means of the gradients that they correct). In a stage, rules act in the order of their names.
"""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, get_args

from torch import Tensor

from ..utils.errors import UsageError, unknown_name
from ..utils.state import State
from .contexts import EndContext, FoldContext, Folded, LookContext, LossContext, RoundContext, StepContext
from .declarations import Declared

if TYPE_CHECKING:
    from .plan import Plan

HOOKS = ("start", "personalize", "batch", "outputs", "loss", "gradients", "end", "fold")
"""The hooks that act; :meth:`Rule.bind` declares."""
GradientStage = Literal["objective", "transform", "step"]
GRADIENT_STAGES: tuple[GradientStage, ...] = get_args(GradientStage)


class Rule:
    """Base class of rules, which changes nothing.

    ``personalize``, ``batch``, ``loss`` and ``gradients`` run under ``torch.vmap`` and are recorded: they must not
    branch on values of tensors. All hooks are pure, except that ``loss`` may write into :attr:`Declared.buffers`.

    Attributes:
        needs_shared: Refusals begin with this use of parameters that clients load and train; empty, here and below: the
            rule needs nothing of this kind.
        needs_several_steps: The notice of a round of one step from the loaded values begins with this reason.
        needs_plain_steps: Refusals begin with this claim, which holds only if each local step moves every parameter
            along its gradient, starting from the loaded values, by SGD without momentum.
        allows_momentum: ``needs_plain_steps`` allows momentum that is reset each round.
        needs_entries_only: Refusals end with this reason why clients must send only the model's entries, and no rule
            may read those of single clients.
        needs_classes: Refusals begin with this use of classes, of which each sample must have one.
        needs_one_input: Refusals begin with this use of samples, which must be one array, such as an image.
        personalizes: ``use``: a client evaluates the result of :meth:`personalize` instead of the entries that it loads
            and keeps; ``start``: local work starts from that model, too.
        buffers_alone: Whether :meth:`personalize` changes only buffers, so that parameters start from the loaded
            values.
        gradient_stage: What :meth:`gradients` does: ``objective``: it adds the gradient of a term of the client's
            objective; ``transform``: it transforms that objective's gradient; ``step``: it corrects the result.
        on_copies: Whether :meth:`gradients` is also called, separately, for each rule's :attr:`Declared.model`.

    """

    needs_shared: ClassVar[str] = ""
    needs_several_steps: ClassVar[str] = ""
    needs_plain_steps: ClassVar[str] = ""
    allows_momentum: ClassVar[bool] = False
    needs_entries_only: ClassVar[str] = ""
    needs_classes: ClassVar[str] = ""
    needs_one_input: ClassVar[str] = ""
    personalizes: ClassVar[Literal["", "use", "start"]] = ""
    buffers_alone: ClassVar[bool] = False
    gradient_stage: ClassVar[GradientStage] = "transform"
    on_copies: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.gradient_stage not in GRADIENT_STAGES:
            raise unknown_name(f"gradient_stage of {cls.__name__}", cls.gradient_stage, GRADIENT_STAGES)
        if (cls.personalize is not Rule.personalize) != bool(cls.personalizes):
            raise UsageError(
                f"{cls.__name__}: personalize() and the class attribute personalizes ('use' or 'start') go together: "
                "give both or neither"
            )

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

    def bind(self, plan: Plan) -> Declared:
        """Return the rule resolved against a plan whose rules are not bound yet, with its declarations.

        Raise :class:`UsageError`, without the method's name, to refuse the plan.
        """
        return Declared(self)

    def start(self, client: LookContext) -> State:
        """Return the client's memory for the round, before local work.

        Additional entries, not in :attr:`Declared.memory`, last until :meth:`end`.
        """
        return client.memory

    def personalize(self, state: State, client: RoundContext) -> State:
        """Return the client's model, given its loaded and personal entries."""
        return state

    def batch(self, x: Tensor, y: Tensor, step: StepContext) -> tuple[Tensor, Tensor]:
        """Return the batch to train on, in the shapes of ``x [B, ...]`` and ``y [B, ...]``."""
        return x, y

    def outputs(self, outputs: Tensor, step: LossContext) -> Tensor:
        """Return the outputs that the training loss reads, in the shape of ``outputs``, such as calibrated logits.

        They also pass through here in :meth:`LossContext.loss_at`; evaluation reads the network's.
        """
        return outputs

    def loss(self, loss: Tensor, step: LossContext) -> Tensor:
        """Return the training objective (scalar), given the loss on the batch or the previous rule's objective.

        It must depend on ``loss``; to change what the loss is computed from, define :meth:`outputs`.
        """
        return loss

    def gradients(self, grads: State, step: StepContext) -> State:
        """Return the gradients for the optimizer, by name of the model's trained entries.

        For a copy (:attr:`on_copies`), names are the model's, too, and ``step.loaded`` is empty.
        """
        return grads

    def end(self, client: EndContext) -> tuple[State, State]:
        """Return the client's memory after local work, and its upload: exactly :attr:`Declared.sends`."""
        return client.memory, {}

    def fold(self, server: FoldContext) -> Folded:
        """Return the server's memory after a round, and the entries of :attr:`Declared.sets`."""
        return Folded(server.memory)
