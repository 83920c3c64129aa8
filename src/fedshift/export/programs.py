"""A network with the scaling of its inputs as a program: exported by ``torch.export`` and converted to ONNX.

A program needs no code from fedshift or the user. The torch program performs the same operations as the run's
evaluation; ONNX runtimes compute the same network in a different order, so scores differ by rounding.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..core.network import to_memory_format
from ..data.preparation import Preparation
from ..nn.several_inputs import call_with
from ..tasks import CLASSIFICATION, Task
from ..utils.errors import UsageError

STEPS = "steps.json"
"""Name of the steps of its use in a program."""
TRACED = 2
"""Number of samples used to trace a program; torch would treat a size of 1 as a constant."""


class Program(nn.Module):
    """``network`` for samples as ``preparation`` stores them, with the computations of a run's evaluation.

    ``layout``: memory format of images; ``low``: number format of ``torch.autocast`` in which layers compute; None:
    that of the weights; ``task``: converts the network's outputs to the program's, with numbers in the data's unit.
    """

    def __init__(
        self, network: nn.Module, preparation: Preparation, dtype: torch.dtype, layout: torch.memory_format, *,
        low: torch.dtype | None, task: Task = CLASSIFICATION,
    ) -> None:  # fmt: skip
        super().__init__()
        self.task = task
        self.preparation, self.network = preparation, network
        self.dtype, self.layout, self.low = dtype, layout, low

    def forward(self, *x: Tensor) -> Tensor:
        """Return scores or numbers ``[N, outputs]`` for raw samples ``x [N, ...]``, or for each of several inputs."""
        names = [each.name for each in self.preparation.inputs]
        x = tuple(to_memory_format(self.preparation.scale(each, self.dtype), self.layout) for each in x)
        with torch.autocast("cpu", self.low) if self.low else nullcontext():
            scores: Tensor = call_with(self.network, dict(zip(names, x, strict=True))) if names else self.network(*x)
        return self.task.decode(scores.to(self.dtype) if self.low else scores)


def require_samplewise(network: nn.Module) -> None:
    """Raise :class:`UsageError` if the prediction for a sample depends on the other samples in its batch."""
    for name, layer in network.named_modules():
        if isinstance(layer, _BatchNorm) and layer.running_mean is None:
            raise UsageError(
                f"layer {name!r} normalizes by the batch (track_running_stats=False), so that the prediction for a "
                "sample depends on others: it cannot be exported or applied; train a network with running statistics"
            )


def trace(program: Program) -> torch.export.ExportedProgram:
    """Trace ``program`` for any number of samples; exceptions from torch are not caught."""
    sample = torch.zeros(TRACED, *program.preparation.shape, dtype=program.preparation.torch_dtype)
    parts = program.preparation.divide(sample)
    sizes = tuple({0: torch.export.Dim("N")} for _ in parts)
    with _quiet(), torch.no_grad():
        return torch.export.export(program.eval(), parts, dynamic_shapes=(sizes,))


def save_program(traced: torch.export.ExportedProgram, path: Path, steps: Mapping[str, str]) -> None:
    """Write a program for ``torch.export.load``; ``steps`` of its use become its extra file ``steps.json``."""
    with _quiet():
        torch.export.save(traced, path, extra_files={STEPS: json.dumps(steps)})


def save_onnx(
    traced: torch.export.ExportedProgram, path: Path, *, computed: torch.dtype, output: str = "scores",
    inputs: Sequence[str] = ("x",), steps: Mapping[str, str] | None = None,
) -> str:  # fmt: skip
    """Write an ONNX program whose output is named ``output``; ``computed``: number format of its layers.

    ``inputs``: names of its inputs; ``steps`` of its use become its metadata ``steps.json``.

    Returns "", or the reason if the program cannot be written.
    """
    if computed != torch.float32:
        return (
            f"the network computes in {str(computed).removeprefix('torch.')}, which ONNX's convolutions do not support"
        )
    if not all(map(find_spec, ("onnx", "onnxscript"))):
        return "the packages onnx and onnxscript are missing (pip install 'fedshift[export]')"
    try:
        with _quiet():
            converted = torch.onnx.export(
                traced, input_names=list(inputs), output_names=[output], dynamo=True, verbose=False
            )
            assert converted is not None
            converted.model.metadata_props[STEPS] = json.dumps(steps or {})
            converted.save(path)
    except Exception as error:  # three packages may raise any type
        return f"torch cannot convert it ({first_line(error)})"
    return ""


def first_line(error: BaseException) -> str:
    """Return an error's first line, or its type if it has no text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:200] if lines else type(error).__name__


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's warnings and log messages about its own programs."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)
