"""Average: the server's entries, completed by the mean of the clients' personal ones.

FedWon (Zhuang and Lyu 2024, arXiv:2306.05879) measures FedBN so in table 12.
"""

from ...data.samples import Samples
from ...utils.state import State
from ..policy import policy, require_personal_models
from ..unseen_clients import PolicyContext


@policy(requires=(require_personal_models,))
def average(context: PolicyContext, _: Samples) -> State:
    """Complete the server's entries by the mean of the clients' personal ones, by the method's weights of uploads."""
    return context.average
