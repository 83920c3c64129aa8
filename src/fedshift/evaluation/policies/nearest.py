"""Nearest: the model of the client that fits the new client's labeled training data best."""

from ...data.samples import Samples
from ...utils.state import State
from ..metrics import evaluate
from ..policy import policy, require_personal_models
from ..unseen_clients import PolicyContext


@policy(data="labels", compares=True, requires=(require_personal_models,))
def nearest(context: PolicyContext, train: Samples) -> State:
    """Use the model of the client with the smallest loss on the new client's training data."""

    def measure_loss(state: State) -> float:
        return float(evaluate(context.plan, state, train, context.task, context.classes)["loss_sum"])

    return context.find_nearest(measure_loss)
