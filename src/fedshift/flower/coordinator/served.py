"""The experiment of a run across machines, restored on the coordinator's machine: models, but no samples."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, replace
from pathlib import Path
from typing import Never

from ...config.expressions import trust_only
from ...config.seeds import parse_seeds
from ...config.settings_file import FILE
from ...config.spec import CompareSpec, RunSpec
from ...data.decoding import Decoding
from ...data.decoding.volumes import parse_spacing
from ...data.federation import Federation
from ...data.patches import Patches, parse_size
from ...data.sources import SCALES
from ...experiments.experiment import Experiment
from ...experiments.factory import make_methods, resolve_model
from ...experiments.restoration import AT_SITE, load_spec, select_trials
from ...results.run_directory import MACHINES, POPULATION
from ...utils.errors import UsageError
from .descriptions import ClientRegistry


def load_served(directory: Path, code: Collection[str] = ()) -> Experiment:
    """Load the experiment of `fedshift serve` in ``directory``, which allows restoring the server's models.

    Args:
        directory: Run directory.
        code: User functions (``package.module:function``) that its settings may name.

    Raises:
        UsageError: Samples are scaled by values that only the sites know, so that no model works without the sites.
        FedshiftError: Files of the run are damaged.

    """
    spec = load_spec(directory, needs_data=False, code=code)
    registry = ClientRegistry.read(directory / MACHINES / POPULATION)
    scales = {client.scale for client in registry.clients}
    if len(scales) > 1 or not scales <= SCALES.keys():
        raise UsageError(f"the samples of {directory} are scaled by values that only their sites know: {AT_SITE}")
    spec = replace(spec, engine="sequential", workers=None, device="cpu", log=None)
    with trust_only(code, directory / FILE):
        data = _describe_files(registry, spec).normalize(SCALES[scales.pop()])
        experiment = Experiment(
            methods=make_methods(spec), data=data,
            model=resolve_model(spec.model, data.sample_shape, data.task, data.inputs),
            settings=registry.make_settings(spec), seeds=parse_seeds(spec.seeds), config=asdict(spec),
            make_engine=_refuse,
        )  # fmt: skip
    return select_trials(experiment.keep_labels(directory))


def _describe_files(registry: ClientRegistry, spec: RunSpec | CompareSpec) -> Federation:
    """Return the sites' data with what is known of their files: patches, and how they are decoded."""
    data: Federation = registry.to_federation(spec.classes, spec.task)
    axes = len(data.sample_shape) - 1
    if spec.patch:
        data = data.cut_patches(parse_size(spec.patch))
    if spec.patch and spec.image_size:
        whole = (spec.image_size,) * axes
        data = data.map_splits(
            lambda split: split.replace(patches=Patches.whole(split.shape[1:], whole, len(split.store), resized=whole))
        )
    kinds, steps = {client.files for client in registry.clients}, parse_spacing(spec.spacing)
    if kinds == {"array"} or len(kinds) > 1 or "signal" in kinds:
        return data
    window = next((client.window for client in registry.clients), None)
    how = Decoding(kind=kinds.pop(), window=window, spacing=steps * axes if len(steps) == 1 else steps)
    return replace(data, clients=tuple(replace(client, decoding=how) for client in data.clients))


def _refuse(*_: object) -> Never:
    raise UsageError("samples are at the sites: continue the run (fedshift serve --resume)")
