"""Requirements: what one part of a method needs of the others, declared as data.

:mod:`fedshift.core.compatibility` checks all of them in one place.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Requirements:
    """Needs of a rule or an aggregation; a need that is a text is absent where the text is empty.

    Args:
        unique: The method has no other rule of this kind.
        shared_entries: Clients load parameters that they train. Begins the refusal: what the part does with them.
        some_loaded: The shared entries that the part needs; clients load some of these. Empty: none in particular.
        from_server: Clients load all of these entries, and no rule keeps copies of them: they are the server's alone.
        several_steps: Clients may take more than one step a round. Begins the refusal: why one step is too few.
        plain_steps: Each local step moves every parameter along its gradient, starting from the loaded values: SGD
            without momentum, and no rule that changes the start or freezes parameters. Begins the refusal: the claim
            that holds only then.
        momentum: ``plain_steps`` may carry momentum that starts anew each round.
        loads_everything: Clients load every entry. Begins the refusal: what the part does.
        entries_only: Clients send nothing beside the model's entries. Ends the refusal: what the part does with these.
        trains_everything: No rule leaves parameters of the model untrained. Begins the refusal: what the part does.
        averages: Uploads are averaged. Begins the refusal: what the part derives from their mean.
        no_constant_buffers: The only buffers that clients send are those of normalization layers. Ends the refusal: the
            harm done to others.
        step_budget: The part reads the number of steps of the round, so that clients with different numbers cannot be
            stepped together.
        separate_samples: The gradient of each sample is that of its loss alone, and nothing else sees it: no
            BatchNorm, no loss that is divided by the weights of a batch, and no rule that changes the loss, reads
            targets, observes the model, or sends what reveals more than the update. Begins the refusal: what the part
            does.
        classes: Each sample has one class. Begins the refusal: what the part does with classes.

    """

    unique: bool = False
    shared_entries: str = ""
    some_loaded: frozenset[str] = frozenset()
    from_server: frozenset[str] = frozenset()
    several_steps: str = ""
    plain_steps: str = ""
    momentum: bool = False
    loads_everything: str = ""
    entries_only: str = ""
    trains_everything: str = ""
    averages: str = ""
    no_constant_buffers: str = ""
    step_budget: bool = False
    separate_samples: str = ""
    classes: str = ""
