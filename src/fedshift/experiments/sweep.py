"""A sweep: one comparison for each combination of settings' values, each in its own run directory.

Every combination is checked before the first one runs: its settings, its data, and whether methods, model and the files
of an earlier run fit them. A combination equals `fedshift compare` with the same settings, bit for bit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from itertools import count, product
from pathlib import Path
from typing import Any

from ..config.expressions import split_expressions
from ..config.spec import CompareSpec, SweepSpec
from ..data.sources import parse_changes
from ..methods import METHODS
from ..report.curves import CurvePoint, format_setting
from ..results.run_directory import to_file_name
from ..results.schema import RunSummary
from ..results.summary import holds_run, read_summary
from ..utils.errors import Ref, UsageError, unknown_name
from .experiment import Experiment
from .factory import anchor_paths, make_methods, make_settings
from .restoration import find_method
from .run_queue import QueuedRun, read_outcome

NONE = "none"
"""Value that leaves a setting unset."""
LONGEST = 80
"""Maximum number of characters of a value in a directory name."""
WHOLE = {
    "methods": "every combination compares all methods: list them with --methods",
    "log": "it changes no result: give a single value",
    **dict.fromkeys(
        ("metric", "select", "target_metric", "seeds"),
        "a sweep compares all combinations by the same value: give a single value",
    ),
}
"""Settings that belong to the sweep as a whole, and the reason."""


@dataclass(frozen=True, kw_only=True)
class Combination:
    """``values`` of the swept settings, the resulting comparison, and its directory within the sweep's."""

    values: Mapping[str, object]
    spec: CompareSpec
    folder: str

    def to_queued_run(self, path: Path, make: Callable[[CompareSpec], Experiment]) -> QueuedRun:
        """Return the combination's run in the sweep in ``path``; ``make``: makes its experiment."""
        settings = asdict(self.spec)
        return QueuedRun(folder=path / self.folder, settings=settings, experiment=partial(make, self.spec))

    def read_outcome(self, path: Path) -> str | None:
        """Return what diverged in it, ``""`` for nothing; None if it has not ended in sweep ``path``."""
        diverged = read_outcome(path / self.folder, asdict(self.spec))
        return f"{self.folder}: {diverged}" if diverged else diverged


def make_combinations(spec: SweepSpec, began: Path | None = None) -> list[Combination]:
    """Return all combinations; the first setting varies slowest.

    Args:
        spec: settings of the sweep.
        began: base directory of relative data paths; None: the current one.

    Raises:
        UsageError: a value is not allowed; pydantic's ``ValidationError`` likewise.

    """
    over = parse_swept(spec.over)
    if not over:
        raise UsageError(
            "a sweep needs settings and their values: {}, once for each setting", Ref(over="epochs=1,4,16")
        )
    common = {field.name: getattr(spec, field.name) for field in fields(CompareSpec)}
    found: list[Combination] = []
    for texts in product(*over.values()):
        given = {name: _parse_value(name, text) for name, text in zip(over, texts, strict=True)}
        made = CompareSpec(**common | given)
        values = {name: getattr(made, name) for name in over}
        made = anchor_paths(made, began)
        if repr(values) in [repr(other.values) for other in found]:  # 1 is one client, 1.0 is all
            raise UsageError(f"over {', '.join(over)}: {' '.join(texts)} is the same as another value; drop one")
        found.append(Combination(values=values, spec=made, folder=_folder_name(values, [c.folder for c in found])))
        _parse_expressions(found[-1])
    return found


def parse_swept(texts: Sequence[str]) -> dict[str, list[str]]:
    """Return settings and their values in ``texts`` such as ``["epochs=1,4"]`` and ``["epochs=1,4,lr=0.1"]``.

    Commas inside brackets or quotes do not separate values; square brackets around a value are removed.
    """
    allowed = [field.name for field in fields(CompareSpec) if field.name not in WHOLE]
    found: dict[str, list[str]] = {}
    for text in texts:
        name = None
        for part in split_expressions("over", text):
            if begun := re.match(r"([A-Za-z][\w-]*)\s*=\s*(.*)", part, re.DOTALL):
                name, part = begun[1].replace("-", "_"), begun[2]
                if name in WHOLE:
                    raise UsageError(f"over {name}: {WHOLE[name]}")
                if name not in allowed:
                    raise unknown_name("setting", name, allowed)
                if name in found:
                    raise UsageError(f"over {name}: it is given twice; write all of its values after one {name}=")
                found[name] = []
            if name is None:
                raise UsageError(f"over {text!r}: write a setting and its values, such as epochs=1,4,16")
            value = part[1:-1] if part.startswith("[") and part.endswith("]") else part
            if not value or value in found[name]:
                what = f"{value} twice" if value else "an empty value"
                raise UsageError(f"over {text!r}: {name} has {what}; drop one")
            found[name].append(value)
    return found


def split_settings(over: Sequence[str]) -> tuple[str, ...]:
    """Return ``over`` with one text per setting, the form in which it is stored."""
    quoted = {
        name: [
            f"[{value}]" if value.startswith("[") or len(split_expressions("over", value)) > 1 else value
            for value in values
        ]
        for name, values in parse_swept(over).items()
    }
    return tuple(f"{name}={','.join(values)}" for name, values in quoted.items())


def check_combination(combination: Combination, path: Path, make: Callable[[CompareSpec], Experiment]) -> None:
    """Raise :class:`UsageError`, naming the combination, unless it can be run or continued in sweep ``path``.

    ``make``: makes its experiment.
    """
    try:
        make(combination.spec).check_compatible(path / combination.folder)
    except UsageError as error:
        raise UsageError(f"{combination.folder}: {{}}", error) from error


def collect_points(wanted: Sequence[Combination], path: Path) -> Iterator[tuple[Combination, CurvePoint]]:
    """Yield the results so far of the combinations of sweep ``path`` that have started.

    Methods have the same labels in all combinations, those given now, however a sweep that was continued spelled them.
    """
    for combination in wanted:
        folder = path / combination.folder
        if holds_run(folder):
            study = read_summary(folder)
            given = {m.label: find_method(m.label, study) for m in METHODS.parse_all(combination.spec.methods)}
            yield combination, CurvePoint(combination.values, _rename(study, given))


def _rename(study: RunSummary, old: Mapping[str, str]) -> RunSummary:
    """Return ``study`` with other labels; ``old``: its labels by the new ones."""
    new = {label: name for name, label in old.items()}
    return replace(
        study,
        rows=study.rows.assign(method=study.rows["method"].map(new)),
        lag=study.lag.assign(method=study.lag["method"].map(new)),
        moves=study.moves.assign(method=study.moves["method"].map(new)),
        unmeasured=tuple(new[method] for method in study.unmeasured if method in new),
        traffic=study.traffic.assign(method=study.traffic["method"].map(new)),
        methods={new[label]: facts for label, facts in study.methods.items()},
        read_cases=lambda method, seed: study.read_cases(old[method], seed),
        read_validation=lambda method, seed: study.read_validation(old[method], seed),
    )


def _parse_expressions(combination: Combination) -> None:
    """Raise :class:`UsageError` for expressions that cannot be read, before any data are loaded."""
    spec = combination.spec
    try:
        make_methods(spec)
        parse_changes(spec)
        make_settings(replace(spec, newcomers=None), ())
    except UsageError as error:
        raise UsageError(f"{combination.folder}: {{}}", error) from error


def _parse_value(name: str, text: str) -> Any:
    """Return the value of ``text``, unchecked; None if it leaves the setting unset."""
    default = next(field.default for field in fields(CompareSpec) if field.name == name)
    return None if text == NONE and default is None else text


def _folder_name(values: Mapping[str, object], taken: Sequence[str]) -> str:
    """Return a directory name such as ``epochs=1,batch_size=10``, with a number added if it is taken."""
    name = ",".join(f"{key}={to_file_name(format_setting(key, value))[:LONGEST]}" for key, value in values.items())
    return next(free for n in count(1) if (free := name if n == 1 else f"{name}-{n}") not in taken)
