"""The policies for an unknown client beside one another: which make sense, what they need, what their models get right.

FedBN compares its own in appendix G (arXiv:2102.07623), FedWon one global model with FedBN's average in table 12
(arXiv:2306.05879).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..core.plan import Plan
from ..core.selection import batch_norm, norm_statistics
from ..data.federation import ClientData
from ..data.samples import Samples
from ..engines.engine import Diverged
from ..evaluation.metrics import evaluate
from ..evaluation.unseen_clients import check_policy, has_statistics, list_batch_norm_parameters
from ..experiments.trial import Trial
from ..results.schema import Row
from ..utils.errors import FedshiftError, UsageError, unknown_name
from ..utils.state import State

UNCHANGED = "as it is"
"""What a method with one global model gives an unknown client: that model."""
POLICIES = ("average", "reestimate", "nearest", "finetune", "finetune_bn")
LABELED = frozenset({"nearest", "finetune", "finetune_bn"})
ESTIMATED = frozenset({"reestimate", "finetune", "finetune_bn"})  # which take statistics of the client's samples

NEEDS = {
    "inputs": "the new client's training inputs, without labels",
    "labels": "its training inputs with labels",
    "entries": (
        "what the run's clients keep to themselves, which a simulation sees and a deployment only where they agree"
    ),
}
"""What a policy may need, and what that is in a sentence."""


@dataclass(frozen=True, kw_only=True, eq=False)
class AdaptedModel:
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


def parse_policies(asked: str | Sequence[str] | None) -> tuple[str, ...]:
    """The policies that a person names, a text with commas; None: all. :class:`UsageError` for an unknown one."""
    named = asked.split(",") if isinstance(asked, str) else POLICIES if asked is None else asked
    wanted = tuple(dict.fromkeys(name.strip() for name in named))
    for name in wanted:
        if name not in POLICIES:
            raise unknown_name("policy for new clients", name, POLICIES)
    return wanted


def applicable_policies(plan: Plan, wanted: Collection[str]) -> tuple[str, ...]:
    """Which of the policies ``wanted`` make sense under ``plan``.

    A method with one global model has that model, always shown; what is averaged and nearest has no meaning there.
    """
    if not plan.personalizes:
        wanted = (UNCHANGED, *(name for name in wanted if name in ESTIMATED))
    possible = {"reestimate": has_statistics(plan), "finetune_bn": bool(list_batch_norm_parameters(plan))}
    return tuple(name for name in wanted if possible.get(name, True))


def inapplicable_policies(plans: Iterable[Plan], wanted: Collection[str]) -> list[str]:
    """Which of the policies ``wanted`` make no sense under which methods, in sentences."""
    plans = list(plans)
    whole = [plan.method.name for plan in plans if not plan.personalizes]
    plain = [plan.method.name for plan in plans if not has_statistics(plan)]
    same = " and ".join(name for name in ("average", "nearest") if name in wanted)
    said = [f"{same}: the one global model, shown as it is, under {', '.join(whole)}"] if same and whole else []
    if plain and "reestimate" in wanted:
        said.append(f"reestimate: there are no BatchNorm statistics under {', '.join(plain)}")
    fixed = [plan.method.name for plan in plans if not list_batch_norm_parameters(plan)]
    if fixed and "finetune_bn" in wanted:
        said.append(f"finetune_bn: there is no BatchNorm to train under {', '.join(fixed)}")
    return said


def describe_needs(plan: Plan, policy: str) -> tuple[str, ...]:
    """What ``policy`` needs beside what the server holds: see :data:`NEEDS`."""
    lacking = [entry for entry in plan.entries if entry.name not in plan.sent]  # averaged over clients' own
    if policy == "reestimate":
        lacking = [entry for entry in lacking if not norm_statistics(entry)]
    if policy == "finetune_bn":
        lacking = [entry for entry in lacking if not batch_norm(entry)]
    data = {"reestimate": ("inputs",)} | dict.fromkeys(LABELED, ("labels",))
    return (*data.get(policy, ()), *(("entries",) if lacking or policy == "nearest" else ()))


def make_models(
    trial: Trial,
    training: Mapping[str, Samples],
    wanted: Collection[str],
    *,
    rounds: int = 1,
    inputs: Samples | None = None,
    say: list[str] | None = None,
) -> Iterator[AdaptedModel]:
    """A model of ``trial`` for each client with ``training`` data by each of the policies ``wanted`` that makes sense.

    ``rounds``: rounds of local work that ``finetune`` and ``finetune_bn`` do. ``inputs``: what ``reestimate`` measures
    instead of the client's training data. ``say``: takes a sentence for each model that is left out, where
    fine-tuning diverges or a client has too few samples for a policy. The trial is not changed. Without ``say``,
    raises :class:`UsageError` where a client's data are too few to fine-tune on.
    """
    plan = trial.plan
    policies = applicable_policies(plan, wanted)
    if trial.server.round == 0:
        raise FedshiftError(f"{plan.method.name}, seed {trial.seed}, has done no round: go on with the run first")
    for policy in policies if say is None else ():
        check_policy(plan, policy, training)
    for name, split in training.items():
        data = dict.fromkeys(policies, split)
        if inputs is not None and "reestimate" in data:
            data["reestimate"] = inputs
        few = [policy for policy in data if policy in ESTIMATED and len(data[policy]) < plan.smallest_batch]
        if few and say is not None:
            _say_once(say, f"client {name!r}: one sample has no variance to normalize by, so without {', '.join(few)}")
            data = {policy: data[policy] for policy in data if policy not in few}
        for policy in data:
            try:
                state = trial.unseen_clients.make_state(
                    "average" if policy == UNCHANGED else policy, name, data[policy], rounds
                )
            except Diverged as error:
                if say is not None:
                    _say_once(
                        say, f"{plan.method.name}, seed {trial.seed}: {error}. Fine-tuned there, it has no model."
                    )
                continue
            assert state is not None  # a round was done
            yield AdaptedModel(
                method=plan.method.name, seed=trial.seed, policy=policy, client=name, needs=describe_needs(plan, policy),
                state=state,
            )  # fmt: skip


def _say_once(said: list[str], text: str) -> None:
    if text not in said:
        said.append(text)


def evaluate_model(trial: Trial, model: AdaptedModel, client: ClientData) -> Row:
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
