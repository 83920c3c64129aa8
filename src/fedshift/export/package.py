"""The directory of an exported model, written completely or not at all.

weights.safetensors    state dictionary of the network, after the method's surgery
program.pt2            the network with the scaling of its inputs; needs only torch
model.onnx             the same in ONNX, if it can be converted
model.json             inputs, classes, facts and checksums
README.md              the model card
"""

from __future__ import annotations

import json
import math
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from operator import eq
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor, nn

from ..core.plan import Plan
from ..data.far_values import FarValues
from ..data.preparation import Normalization
from ..data.samples import Samples
from ..data.schema import Schema
from ..evaluation.metrics import BATCH
from ..nn.adapters import merge_adapters
from ..tasks import TASKS
from ..tasks.segmentation import LEFT_OUT
from ..utils.errors import Ref, UsageError
from ..utils.files import disk_error, require_writable
from ..utils.state import State, load_entries
from .loading import DESCRIPTION, FORMAT, PROGRAM, ExportedModel, name_predictions
from .model_card import ModelFacts, render_card
from .programs import Program, first_line, require_samplewise, save_onnx, save_program, trace
from .steps import list_steps

WEIGHTS, ONNX, CARD = "weights.safetensors", "model.onnx", "README.md"
TRIED = {"classification": "hits", "segmentation": "hits", "multilabel": "exact", "regression": "squared"}
"""The count that is used to compare a program with the run's records, by task."""
ROUNDED = 1e-4
"""Relative tolerance for sums of squared errors, which differ by rounding."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainedModel:
    """A model to export.

    Args:
        network: The network after surgery, with any weights.
        state: The network's entries.
        plan: The plan of its training and evaluation.
        schema: The meaning of inputs and outputs, and the preparation of samples.
        facts: Facts about the model.
        tests: Test samples by client, used to test the files.

    """

    network: nn.Module
    state: State
    plan: Plan
    schema: Schema
    facts: ModelFacts
    tests: Mapping[str, Samples]


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """Files written, results of testing them, and notices for the user."""

    directory: Path
    files: tuple[str, ...]
    checks: tuple[str, ...]
    notices: tuple[str, ...]


def require_new(directory: Path) -> None:
    """Raise :class:`UsageError` unless ``directory`` is missing or empty."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UsageError(f"{directory} contains other files: choose a directory that is new or empty")
    require_writable(directory)


def require_models(directory: Path) -> None:
    """Raise :class:`UsageError` if ``directory`` contains anything but exported models, which may be replaced."""
    if directory.is_file():
        raise UsageError(f"{directory} is a file: choose a directory ({{}})", Ref("export"))
    for entry in directory.iterdir() if directory.is_dir() else ():
        if not (entry / DESCRIPTION).is_file():
            raise UsageError(
                f"{directory} contains {entry.name}, which is not an exported model: choose another directory ({{}})",
                Ref("export"),
            )


def write_package(model: TrainedModel, directory: Path, *, onnx: bool = True, renew: bool = False) -> ExportReport:
    """Write ``model`` to ``directory``, and test the programs on its test samples.

    Args:
        model: The model.
        directory: New or empty directory.
        onnx: Whether to also write an ONNX program.
        renew: Replace an exported model in ``directory``.

    Raises:
        UsageError: The directory contains other files, or the network cannot predict a single sample.
        FedshiftError: Files cannot be written.

    """
    if not (renew and (directory / DESCRIPTION).is_file()):
        require_new(directory)
    require_samplewise(model.network)
    beside = directory.parent / f".{directory.name}.partial"
    try:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        report = _fill(model, beside, directory, onnx=onnx)
        old = beside.with_suffix(".old")
        shutil.rmtree(old, ignore_errors=True)
        if directory.is_dir():
            directory.rename(old)
        beside.rename(directory)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise disk_error(directory, error) from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return report


def _fill(model: TrainedModel, folder: Path, directory: Path, *, onnx: bool) -> ExportReport:
    network = model.network.cpu()
    load_entries(network, model.state)
    network = merge_adapters(network).eval()
    state = network.state_dict()  # may have extra state, which is no tensor
    entries = {name: x.detach().contiguous().clone() for name, x in state.items() if isinstance(x, Tensor)}
    names = {"method": model.facts.method, "client": model.facts.client or "", "seed": str(model.facts.seed)}
    header = {**names, "round": str(model.facts.round)}
    (folder / WEIGHTS).write_bytes(save(entries, metadata=header))
    plan, low = model.plan, model.plan.autocast
    computed = low or plan.dtype
    program = Program(network, model.schema.preparation, plan.dtype, plan.image_format, low=low, task=model.schema.task)
    notices, steps = list[str](), list_steps(model.schema.preparation, model.facts.kind)
    answers: dict[str, Callable[..., Tensor]] = {}
    try:
        traced = trace(program)
        save_program(traced, folder / PROGRAM, steps)
        answers[PROGRAM] = torch.export.load(folder / PROGRAM).module()
        inputs, output = model.schema.preparation.names, model.facts.answer
        reason = ""
        if onnx:
            reason = save_onnx(traced, folder / ONNX, computed=computed, output=output, inputs=inputs, steps=steps)
    except Exception as error:  # tracing a user's network may raise any type
        notices.append(
            f"no {PROGRAM}: torch cannot trace the network ({first_line(error)}); weights and card are complete"
        )
        reason = "it is converted from that program"
    if reason:
        notices.append(f"no {ONNX}: {reason}")
    elif onnx and (session := _open_onnx(folder / ONNX, model.schema.preparation.names)):
        answers[ONNX] = session
    files = {file.name: file for file in sorted(folder.iterdir())}
    description: dict[str, Any] = {
        "format": FORMAT,
        "input": model.schema.preparation.to_json(),
        "steps": steps,
        "task": model.facts.kind,
        "outputs": model.facts.outputs,
        "classes": model.schema.names,
        "files": {name: sha256(file.read_bytes()).hexdigest() for name, file in files.items()},
        "model": asdict(model.facts),
    }
    loaded = {name: ExportedModel(directory, description, answer) for name, answer in answers.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FarValues)  # of the run's own test samples
        checks = [line for name, each in loaded.items() for line in _check(model, name, each)]
    description["checks"] = checks
    (folder / DESCRIPTION).write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
    sizes = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
    card = render_card(model.facts, model.schema.preparation, model.schema.names, sizes, [*checks, *notices])
    (folder / CARD).write_text(card, encoding="utf-8")
    return ExportReport(directory=directory, files=(*sizes, CARD), checks=tuple(checks), notices=tuple(notices))


def _open_onnx(path: Path, names: Sequence[str]) -> Callable[..., Tensor] | None:
    """Return the ONNX program as a function, or None if no runtime is installed."""
    try:
        import onnxruntime
    except ImportError:
        return None
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda *x: torch.from_numpy(
        session.run(None, {name: each.numpy() for name, each in zip(names, x, strict=True)})[0]
    )


def _check(model: TrainedModel, name: str, loaded: ExportedModel) -> list[str]:
    """Report how many test samples the program gets right, and whether this agrees with the run's records."""
    kind = model.facts.kind
    known = isinstance(model.schema.preparation.scaling, Normalization)  # a table's raw rows are not kept
    counted = kind in TRIED and type(model.schema.task) is TASKS.entries.get(kind)  # a user's task may count otherwise
    tests = model.tests if known and counted else {}
    found = {client: _count_answers(model, loaded, samples) for client, samples in tests.items()}
    right, total = (sum(counts) for counts in zip(*found.values(), strict=True)) if found else (0, 0)
    if not total:
        return []
    measured = (row for row in model.facts.measured if row["split"] == "test")
    recorded = {row["client"]: float(np.sum(row[TRIED[kind]])) for row in measured}
    differing = [
        f"{client} {found[client][0]:.6g}, but {before:.6g} are recorded"
        for client, before in recorded.items()
        if not math.isclose(found[client][0], before, rel_tol=ROUNDED if kind == "regression" else 0)
    ]
    same = "as the run recorded" if recorded and not differing else "without records in the run"
    verdict = f"unlike the run's records ({', '.join(differing)})" if differing else same
    tested = f"{total:,} {'pixels of test images' if kind == 'segmentation' else 'test samples'}"
    outcome = {
        "multilabel": f"{right:,.0f} with every label right",
        "regression": f"squared errors of {right:.4g} in total",
    }.get(kind, f"{right:,.0f} right")
    return [f"{name} was tested on all {tested}: {outcome}, {verdict}."]


def _iterate_samples(samples: Samples) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield stored samples and their targets, some at a time, or case by case."""
    if samples.patches is not None:
        yield from map(samples.read_case, range(len(samples)))
        return
    for part in (slice(start, start + BATCH) for start in range(0, len(samples), BATCH)):
        yield samples.copy_rows(part), samples.targets(part)


def _count_answers(model: TrainedModel, loaded: ExportedModel, samples: Samples) -> tuple[float, int]:
    """Return the count in :data:`TRIED` of predictions of ``loaded`` for ``samples``, and the number of predictions.

    In segmentation, pixels that are not ignored are counted, else samples.
    """
    kind = model.facts.kind
    right, total = 0.0, 0
    for x, y in _iterate_samples(samples):
        predicted = loaded.predict(x)
        if kind == "segmentation":
            known = y != LEFT_OUT
            right, total = right + int((predicted == y)[known].sum()), total + int(known.sum())
            continue
        total += len(y)
        if kind == "regression":
            numbers = torch.tensor(predicted, dtype=torch.float64).reshape(y.shape)
            right += float((numbers - model.schema.task.decode(y)).square().sum())
        else:
            right += sum(map(eq, predicted, name_predictions(y, loaded.task, loaded.classes)))
    return right, total
