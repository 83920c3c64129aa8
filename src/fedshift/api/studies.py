"""A further study in Python: advice on a method."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any
from weakref import finalize

from ..config.spec import AUTO, AdviseSpec, CompareSpec
from ..console.printing import Console
from ..console.terminal import show_progress
from ..diagnosis.checked_experiment import make_checked
from ..diagnosis.search import BASELINE, begin_search, continue_search, hold_out, parse_rates, read_search
from ..diagnosis.search_report import MethodAdvice, write_search
from ..experiments.jobs import Jobs
from ..experiments.python_settings import make_spec, note_user_code, refuse_unknown
from ..methods import METHODS
from ..results.run_directory import RunDirectory
from ..utils.errors import Ref, UsageError
from ..utils.files import ScratchDirectory, require_writable
from ..utils.threads import limit_threads
from ..utils.warning import warn_of


def advise(
    data: Any, *, budget: float = AdviseSpec.budget, methods: Any = AUTO, rates: str | Sequence[float] = AUTO,
    out: str | Path | None = None, resume: bool = False, jobs: Jobs = "auto", progress: bool = False, **settings: Any,
) -> MethodAdvice:  # fmt: skip
    """Recommend a method for the clients in ``data``: diagnose them, then search methods and rates on validation data.

    Args:
        data: As for :func:`compare`.
        budget: Minutes for everything, diagnosis and timing included, predicted by timing a round of each method.
        methods: Methods to try, as for :func:`compare`; by default those that a diagnosis favors.
        rates: Learning rates to try with each method.
        out: Directory to keep the search in; None: a temporary one, deleted with the result.
        resume: Continue the search in ``out``.
        jobs: Maximum number of trials that run side by side.
        progress: Show the progress.
        settings: Other settings of :func:`compare`, applied to every method: ``rounds`` of the last rung,
            ``batch_size``, ``model``, ``seeds`` and so on. Validation data are held out if there are none.

    Warns:
        UserWarning: the data have errors.

    Raises:
        UsageError: a setting is invalid; raised before anything starts, with the allowed values.
        FedshiftError: the baseline diverges at every learning rate, or writing to disk fails.

    """
    refuse_unknown("argument", settings, CompareSpec, ("methods", "lr"))
    if not isinstance(budget, int | float) or not 0 < budget < math.inf:
        raise UsageError("{}: give minutes, a number greater than 0", Ref(budget=budget))
    if resume and out is None:
        raise UsageError("resume=True: say which search to continue (out=DIRECTORY)")
    with note_user_code():
        if out is not None:
            require_writable(Path(out))
        named = None if methods == AUTO else METHODS.parse_all(methods)
        experiment = hold_out(
            lambda held: make_checked(make_spec({"data": data, "methods": BASELINE, **settings, **held}, CompareSpec))
        )
        scratch = None if out is not None else ScratchDirectory()
        path = scratch.path if scratch else Path(out or "")
        with closing(RunDirectory(path, resume=resume)) as kept:
            search = (
                read_search(path)
                if resume
                else begin_search(experiment, named, parse_rates(rates, experiment.settings.optimizer), budget)
            )
            kept.write_settings(
                dict(experiment.config) | {"methods": ",".join(search.reasons), "rates": str(rates), "budget": budget}
            )
            shown = show_progress(Console()) if progress else nullcontext(None)
            with limit_threads(settings.get("threads")), shown as callback:
                search = continue_search(experiment, search, path, named, callback=callback, jobs=jobs)
        write_search(search, path)
    warn_of(experiment.data.notices)
    result = MethodAdvice(search, path)
    if scratch:
        finalize(result, ScratchDirectory.close, scratch)
    return result
