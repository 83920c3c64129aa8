"""Fine-tuning: the average, trained on the new client's labeled data by the trial's own local work."""

from ...data.samples import Samples
from ...utils.state import State
from ..policy import policy
from ..unseen_clients import PolicyContext


@policy(data="labels", estimates=True, trains=True)
def finetune(context: PolicyContext, train: Samples) -> State:
    """Train the average on the new client's labeled data by the trial's own local work."""
    return context.finetune(context.average, train)
