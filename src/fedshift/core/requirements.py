"""Requirements of one part of a method on the others, declared as data.

:mod:`fedshift.core.compatibility` checks them; a rule or an aggregation checks further requirements in its ``bind``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Requirements:
    """Requirements of a rule or an aggregation; texts are used in error messages, and an empty text requires nothing.

    Args:
        shared_entries: Clients load parameters that they train. The message starts with this use of them.
        several_steps: The part acts only if clients take more than one step per round from the loaded values. The
            notice of a run in which they do not starts with this reason.
        plain_steps: Each local step moves every parameter along its gradient, starting from the loaded values: SGD
            without momentum, and no rule that changes the start or has phases for entries of the model. The message
            starts with this claim, which holds only then.
        momentum: ``plain_steps`` allows momentum that is reset each round.
        entries_only: Clients send only the model's entries, and no rule reads the entries of single clients. The
            message ends with this use of them.
        mean: Uploads are averaged. The message starts with this use of their mean.
        classes: Each sample has one class. The message starts with this use of classes.
        one_input: A sample is one array, such as an image. The message starts with this use of it.

    """

    shared_entries: str = ""
    several_steps: str = ""
    plain_steps: str = ""
    momentum: bool = False
    entries_only: str = ""
    mean: str = ""
    classes: str = ""
    one_input: str = ""
