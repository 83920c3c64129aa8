"""The directory of an exported model, written as a whole or not at all.

weights.safetensors    state dictionary of the network, after the method's surgery
program.pt2            the network with the scaling of its inputs, for torch alone
model.onnx             the same in ONNX, where it converts
model.json             inputs, classes, facts and checksums
README.md              the model card
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from ..core.plan import Plan
from ..data.samples import Samples
from ..evaluation.metrics import BATCH
from ..tasks import CATALOG, Regression, Task
from ..utils.errors import UsageError
from ..utils.files import disk_error, require_writable
from ..utils.state import State
from .inputs import InputFormat
from .loading import DESCRIPTION, FORMAT, PROGRAM
from .model_card import ModelFacts, describe_output, render_card
from .programs import Program, first_line, require_samplewise, save_onnx, save_program, trace

WEIGHTS, ONNX, CARD = "weights.safetensors", "model.onnx", "README.md"
TRIED = {"classification": "hits", "segmentation": "hits", "multilabel": "exact", "regression": "squared"}
"""Counts of a task by which a program is compared with the run's records."""
ROUNDED = 1e-4
"""Share by which sums of squared errors may differ, by rounding."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainedModel:
    """A model to hand over.

    Args:
        network: The network after surgery, with any weights.
        state: Its entries.
        plan: The plan under which it was trained and evaluated.
        form: What its program takes.
        task: What it predicts.
        classes: Names of the classes, labels or targets, in the order of the network's outputs.
        facts: What is known of it.
        tests: Test samples by client, on which the files are tried.

    """

    network: nn.Module
    state: State
    plan: Plan
    form: InputFormat
    task: Task
    classes: tuple[str, ...]
    facts: ModelFacts
    tests: Mapping[str, Samples]


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """Files written, what was found when they were tried, and what a user should know."""

    directory: Path
    files: tuple[str, ...]
    checks: tuple[str, ...]
    notices: tuple[str, ...]


def require_new(directory: Path) -> None:
    """Raise :class:`UsageError` unless ``directory`` is missing or empty."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UsageError(f"{directory} holds other files: choose a directory that is new or empty")
    require_writable(directory)


def require_models(directory: Path) -> None:
    """Raise :class:`UsageError` where ``directory`` holds anything but exported models, which may be replaced."""
    if directory.is_file():
        raise UsageError(f"{directory} is a file: choose a directory (--export)")
    for entry in directory.iterdir() if directory.is_dir() else ():
        if not (entry / DESCRIPTION).is_file():
            raise UsageError(f"{directory} holds {entry.name}, which is no exported model: choose another (--export)")


def write_package(model: TrainedModel, directory: Path, *, onnx: bool = True, renew: bool = False) -> ExportReport:
    """Write ``model`` into ``directory``, and try the programs on its test samples.

    Args:
        model: The model.
        directory: New or empty directory.
        onnx: Whether to write the program in ONNX too.
        renew: Replace an exported model that is in ``directory``.

    Raises:
        UsageError: The directory holds other files, or the network has no answer for a single sample.
        FedshiftError: The disk refuses.

    """
    renew = renew and (directory / DESCRIPTION).is_file()
    if not renew:
        require_new(directory)
    require_samplewise(model.network)
    beside = directory.parent / f".{directory.name}.partial"
    try:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        report = _fill(model, beside, directory, onnx=onnx)
        if renew:
            old = beside.with_suffix(".old")
            shutil.rmtree(old, ignore_errors=True)
            directory.rename(old)
            beside.rename(directory)
            shutil.rmtree(old, ignore_errors=True)
        else:
            if directory.is_dir():
                directory.rmdir()
            beside.rename(directory)
    except OSError as error:
        raise disk_error(directory, error) from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return report


def _fill(model: TrainedModel, folder: Path, directory: Path, *, onnx: bool) -> ExportReport:
    network = _load_state(model)
    entries = {name: x.detach().contiguous().clone() for name, x in network.state_dict().items()}
    names = {"method": model.facts.method, "client": model.facts.client or "", "seed": str(model.facts.seed)}
    header = {**names, "round": str(model.facts.round)}
    (folder / WEIGHTS).write_bytes(save(entries, metadata=header))
    plan, low = model.plan, model.plan.precision == "bfloat16"
    program = Program(network, model.form, plan.dtype, plan.image_format, low=low, task=model.task)
    notices: list[str] = []
    answers: dict[str, Callable[[Tensor], Tensor]] = {}
    try:
        traced = trace(program, model.form)
        save_program(traced, folder / PROGRAM)
        answers[PROGRAM] = torch.export.load(folder / PROGRAM).module()
        reason = save_onnx(traced, folder / ONNX, low=low, output=model.facts.answer) if onnx else ""
    except Exception as error:  # of every type, from tracing a network of the user's
        notices.append(f"no {PROGRAM}: torch cannot trace the network ({first_line(error)}); weights and card stand")
        reason = "it is made from that program"
    if reason:
        notices.append(f"no {ONNX}: {reason}")
    elif onnx and (session := _open_onnx(folder / ONNX)):
        answers[ONNX] = session
    checks = [line for name, answer in answers.items() for line in _check(model, name, answer)]
    files = {file.name: file for file in sorted(folder.iterdir())}
    description = {
        "format": FORMAT,
        "input": model.form.to_json(),
        "output": describe_output(model.facts),
        "task": model.facts.kind,
        "outputs": model.facts.outputs,
        "classes": model.classes,
        "files": {name: sha256(file.read_bytes()).hexdigest() for name, file in files.items()},
        "checks": checks,
        "model": model.facts.to_json(),
    }
    (folder / DESCRIPTION).write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
    sizes = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
    card = render_card(model.facts, model.form, model.classes, sizes, [*checks, *notices])
    (folder / CARD).write_text(card, encoding="utf-8")
    return ExportReport(directory=directory, files=(*sizes, CARD), checks=tuple(checks), notices=tuple(notices))


def _load_state(model: TrainedModel) -> nn.Module:
    network = model.network.cpu()
    network.load_state_dict({name: x.cpu() for name, x in model.state.items()}, strict=False)  # a tied one stands once
    return network.eval()


def _open_onnx(path: Path) -> Callable[[Tensor], Tensor] | None:
    """Return the ONNX program as a function; None without a runtime here."""
    try:
        import onnxruntime
    except ImportError:
        return None
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda x: torch.from_numpy(session.run(None, {"x": x.numpy()})[0])


def _check(model: TrainedModel, name: str, answer: Callable[[Tensor], Tensor]) -> list[str]:
    """Say how many test samples of each client the program gets right, and how many the run recorded."""
    kind, known = model.facts.kind, model.form.normalization.features is None  # rows as in the table are not kept
    if not known or type(model.task) is not CATALOG.get(kind):  # a task of the user's counts otherwise
        return []
    recorded = {row["client"]: row for row in model.facts.measured if row["split"] == "test"}
    found, total, differing = 0.0, 0, []
    for client, samples in model.tests.items():
        own, count = _count_answers(model, answer, samples)
        found, total = found + own, total + count
        before = _add_up(recorded[client], kind) if client in recorded else own
        if not math.isclose(own, before, rel_tol=ROUNDED if kind == "regression" else 0):
            differing.append(f"{client} {own:.6g} where {before:.6g} are recorded")
    if not total:
        return []
    same = "as the run recorded" if recorded and not differing else "which the run has not recorded"
    verdict = f"other than the run recorded ({', '.join(differing)})" if differing else same
    tried = f"{total:,} {'pixels of test images' if kind == 'segmentation' else 'test samples'}"
    right = {
        "multilabel": f"{found:,.0f} with every label right",
        "regression": f"squared errors of {found:.4g} together",
    }.get(kind, f"{found:,.0f} right")
    return [f"{name} was tried on all {tried}: {right}, {verdict}."]


def _add_up(counts: Mapping[str, Any], kind: str) -> float:
    """Return what :data:`TRIED` names, summed over classes or targets."""
    value = counts[TRIED[kind]]
    return float(sum(value) if isinstance(value, list) else value)


@torch.no_grad()
def _count_answers(model: TrainedModel, answer: Callable[[Tensor], Tensor], samples: Samples) -> tuple[float, int]:
    """Return :func:`_add_up` of the answers to ``samples``, and the number of samples, or of pixels not ignored."""
    task, kind = model.task, model.facts.kind
    found, total = 0.0, 0
    for start in range(0, len(samples), BATCH):
        part = slice(start, start + BATCH)
        made = answer(samples.copy_rows(part))
        counts = task.count(
            task.encode(made) if isinstance(task, Regression) else made, samples.targets(part), len(model.classes)
        )
        found += _add_up(counts, kind)
        total += sum(counts["support"]) if kind == "segmentation" else counts["samples"]
    return found, total
