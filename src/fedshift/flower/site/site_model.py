"""A site's model for use elsewhere, with information about the site's own data and results, but no other site's."""

from __future__ import annotations

from collections.abc import Iterable

from ...core.plan import Plan
from ...core.preparation import apply_surgery
from ...data.federation import Federation
from ...experiments.settings import Settings
from ...export.package import TrainedModel
from ...export.source import find_licenses, list_versions, make_model
from ...models import ModelFactory, make_network
from ...results.run_directory import describe_environment
from ...results.schema import Row
from ...utils.state import State


def collect_site_model(
    plan: Plan,
    data: Federation,
    settings: Settings,
    model: ModelFactory,
    state: State,
    *,
    round: int,
    rows: Iterable[Row],
    sites: int,
) -> TrainedModel:
    """Return the model of the only client in ``data``.

    Args:
        plan: Plan of the trial.
        data: The site's data.
        settings: Settings of the experiment.
        model: Function that makes the network.
        state: The model's entries.
        round: Round after which the client uses it.
        rows: Its measurements after that round.
        sites: Number of sites that train.

    """
    client = data.clients[0]
    return make_model(
        apply_surgery(plan.method, make_network(model, data.sample_shape, data.classes, settings.precision)),
        state,
        plan,
        data,
        client,
        settings,
        model,
        tests={client.name: client.test},
        client=client.name,
        seed=plan.seed,
        round=round,
        choice=f"of {settings.rounds}",
        origin=f"{sites} sites took part, whose samples stayed there.",
        data_in_words=f"{client.name}, at this site",
        licenses=find_licenses(None, client.name),
        measured=tuple(row for row in rows if row["model"] == "personal"),
        versions=list_versions(describe_environment()),
    )
