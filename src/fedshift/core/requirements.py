"""Requirements: what one part of a method needs of the others, declared as data.

:mod:`fedshift.core.compatibility` checks all of them in one place. What one rule or aggregation needs beyond these, its
``bind`` checks.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Requirements:
    """Needs of a rule or an aggregation; a need that is a text is absent where the text is empty.

    Args:
        shared_entries: Clients load parameters that they train. Begins the refusal: what the part does with them.
        several_steps: Clients may take more than one step a round. Begins the refusal: why one step is too few; and the
            notice where a round turns out to be one step, by the sizes of clients, of which a plan knows nothing.
        plain_steps: Each local step moves every parameter along its gradient, starting from the loaded values: SGD
            without momentum, and no rule that changes the start or has phases for entries of the model. Begins the
            refusal: the claim that holds only then.
        momentum: ``plain_steps`` may carry momentum that starts anew each round.
        entries_only: Clients send nothing beside the model's entries, and no rule reads those of single clients. Ends
            the refusal: what the part does with these.
        classes: Each sample has one class. Begins the refusal: what the part does with classes.

    """

    shared_entries: str = ""
    several_steps: str = ""
    plain_steps: str = ""
    momentum: bool = False
    entries_only: str = ""
    classes: str = ""
