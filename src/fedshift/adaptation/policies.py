"""The policies for an unknown client beside one another: which make sense, what they need, what their models get right.

FedBN compares its own in appendix G (arXiv:2102.07623), FedWon one global model with FedBN's average in table 12
(arXiv:2306.05879).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from ..base.errors import FedshiftError, UsageError, unknown
from ..base.state import State
from ..core.plan import Plan
from ..core.select import norm_statistics
from ..data.federation import ClientData
from ..data.split import Split
from ..engines.engine import Diverged
from ..evaluate import evaluate
from ..newcomers import check_policy, estimable
from ..records import Row
from ..trial import Trial

AS_IT_IS = "as it is"
"""What a method with one global model gives an unknown client: that model."""
POLICIES = ("average", "reestimate", "nearest", "finetune")
LABELED = frozenset({"nearest", "finetune"})

NEEDS = {
    "inputs": "the new client's training inputs, without labels",
    "labels": "its training inputs with labels",
    "entries": (
        "what the run's clients keep to themselves, which a simulation sees and a deployment only where they agree"
    ),
}
"""What a policy may need, and what that is in a sentence."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Model:
    """A model for ``client`` by ``policy``, of ``method`` under ``seed``, and what it ``needs``, from :data:`NEEDS`."""

    method: str
    seed: int
    policy: str
    client: str
    needs: tuple[str, ...]
    state: State

    @property
    def title(self) -> str:
        """Method and policy as tables name them."""
        return f"{self.method}: {self.policy}"


def chosen(text: str | None) -> tuple[str, ...]:
    """The policies that a person names with commas, all without a text; :class:`UsageError` for an unknown one."""
    wanted = POLICIES if text is None else tuple(part.strip() for part in text.split(","))
    for name in wanted:
        if name not in POLICIES:
            raise unknown("policy for new clients", name, POLICIES)
    return wanted


def policies_of(plan: Plan, wanted: Collection[str]) -> tuple[str, ...]:
    """Which of the policies ``wanted`` make sense under ``plan``.

    A method with one global model has that model, always shown; what is averaged and nearest has no meaning there.
    """
    if not plan.personalizes:
        wanted = (AS_IT_IS, *(name for name in wanted if name in ("reestimate", "finetune")))
    return tuple(name for name in wanted if name != "reestimate" or estimable(plan))


def needs(plan: Plan, policy: str) -> tuple[str, ...]:
    """What ``policy`` needs beside what the server holds: see :data:`NEEDS`."""
    lacking = [entry for entry in plan.entries if entry.name not in plan.sent]  # averaged over clients' own
    if policy == "reestimate":
        lacking = [entry for entry in lacking if not norm_statistics(entry)]
    data = {"reestimate": ("inputs",), "finetune": ("labels",), "nearest": ("labels",)}.get(policy, ())
    return (*data, "entries") if lacking or policy == "nearest" else data


def models(
    trial: Trial,
    training: Mapping[str, Split],
    wanted: Collection[str],
    *,
    rounds: int = 1,
    inputs: Split | None = None,
    say: list[str] | None = None,
) -> Iterator[Model]:
    """A model of ``trial`` for each client with ``training`` data by each of the policies ``wanted`` that makes sense.

    ``rounds``: rounds of local work that ``finetune`` does. ``inputs``: what ``reestimate`` goes by instead of the
    client's training data. ``say``: takes a sentence where fine-tuning diverges, which leaves that model out. The trial
    is not changed. Raises :class:`UsageError` where a client's data are too few for a policy.
    """
    plan = trial.plan
    policies = policies_of(plan, wanted)
    if trial.server.round == 0:
        raise FedshiftError(f"{plan.method.name}, seed {trial.seed}, has done no round: go on with the run first")
    for policy in policies:
        check_policy(plan, policy, training)
    for name, split in training.items():
        for policy in policies:
            data = inputs if inputs is not None and policy == "reestimate" else split
            try:
                state = trial.newcomers.state("average" if policy == AS_IT_IS else policy, name, data, rounds)
            except Diverged as error:
                if say is not None:
                    say.append(f"{plan.method.name}, seed {trial.seed}: {error}. Fine-tuned there, it has no model.")
                continue
            assert state is not None  # a round was done
            yield Model(
                method=plan.method.name, seed=trial.seed, policy=policy, client=name, needs=needs(plan, policy),
                state=state,
            )  # fmt: skip


def measured_on(trial: Trial, model: Model, client: ClientData) -> Row:
    """What ``model`` gets right on the test data of ``client``, as counts (see ``records``)."""
    counted = evaluate(trial.plan, model.state, client.test, trial.data.classes)
    return {
        "title": model.title, "method": model.method, "policy": model.policy, "needs": ", ".join(model.needs),
        "seed": model.seed, "client": model.client, **counted,
    }  # fmt: skip


def require_no_labels(wanted: Collection[str]) -> None:
    """Raise :class:`UsageError` where a policy needs labels, and there are none."""
    for name in wanted:
        if name in LABELED:
            raise UsageError(f"policy {name!r} needs labels, which --unlabeled has not: give --data, or leave it out")
