"""A site's model for use elsewhere, with information about the site's own data and results, but no other site's."""

from __future__ import annotations

from collections.abc import Iterable

from ...core.plan import Plan
from ...core.preparation import apply_surgery
from ...data.federation import Federation
from ...experiments.settings import Settings
from ...export.model_card import ModelFacts
from ...export.package import TrainedModel
from ...export.source import (
    describe_answers,
    describe_network,
    describe_settings,
    describe_targets,
    find_licenses,
    find_sources,
    list_versions,
)
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
    schema = data.describe_client(client)
    return TrainedModel(
        network=apply_surgery(plan.method, make_network(model, data.sample_shape, data.classes)),
        state=state,
        plan=plan,
        schema=schema,
        facts=ModelFacts(
            **describe_answers(data),
            method=plan.method.label,
            meaning=plan.method.text,
            sources=tuple(find_sources(plan.method)),
            client=client.name,
            seed=plan.seed,
            round=round,
            choice=f"of {settings.rounds}",
            origin=f"{sites} sites took part, whose samples stayed there.",
            network=describe_network(plan, model),
            data=f"{client.name}, at this site. {data.note}".rstrip(". "),
            licenses=find_licenses(None, client.name),
            clients={client.name: {part: len(split) for part, split in client.splits.items()}},
            measured=tuple(row for row in rows if row["model"] == "personal"),
            settings=describe_settings(plan, settings, schema.preparation) | describe_targets(schema),
            versions=list_versions(describe_environment()),
        ),
        tests={client.name: client.test},
    )
