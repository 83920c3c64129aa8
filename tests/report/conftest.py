"""Studies whose tables can be worked out by hand, and their pages, which are drawn once."""

from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from fedshift.report import html, page
from fedshift.results.disclosure import MODEL, Disclosure
from fedshift.results.schema import MethodSummary, RunSummary, rows_to_frame

SUPPORT = {"a": (80, 20), "b": (150, 150)}  # samples of each class in the test data and in the validation data
# Correct classifications in the last of two rounds, by method, seed and client.
LAST = {
    "fedavg": [{"a": 50, "b": 240}, {"a": 52, "b": 246}, {"a": 54, "b": 252}],
    "fedbn": [{"a": 60, "b": 240}, {"a": 63, "b": 249}, {"a": 66, "b": 258}],
}


def evaluation(method, seed, number, client, split, model, hits, support, auc=None):
    """One row; the first class is right as often as it can be, and the mean loss is 1 - accuracy."""
    first = min(hits, support[0])
    samples = sum(support)
    return {
        "method": method, "seed": seed, "round": number, "client": client, "split": split, "model": model,
        "moment": "loaded", "samples": samples, "loss_sum": float(samples - hits), "hits": [first, hits - first],
        "support": list(support), "auc": auc,
    }  # fmt: skip


def in_errors(summary):
    """Return ``summary`` as one of a task of numbers, whose RMSE is a tenth of the hits."""
    rows = summary.rows.to_dict("records")
    for row in rows:
        if row["hits"] is not None:
            error, count = sum(row["hits"]) / 10, row["samples"]
            row |= {
                "squared": [error**2 * count],
                "absolute": [error * count],
                "total": [0.0],
                "square": [count * 400.0],
            }
            row |= {"hits": None, "support": None}
    metrics = ("rmse", "mae", "r2", "loss")
    return replace(
        summary, rows=rows_to_frame(rows), task="regression", metric="rmse", metrics=metrics, classes=1, majority={}
    )


def training(method, seed, number, client, loss):
    blank = dict.fromkeys(("hits", "support", "auc"))
    key = {"method": method, "seed": seed, "round": number, "client": client, "split": "train", "model": "personal"}
    return {**key, "moment": "trained", "samples": 10, "loss_sum": 10 * loss, **blank}


def facts(method):
    local = "fedbn" in method
    conv = {"name": "conv.weight", "type": "Conv2d", "shape": (4, 3, 3, 3), "bytes": 432, "buffer": False}
    norm = {"name": "norm.weight", "type": "BatchNorm2d", "shape": (4,), "bytes": 16, "buffer": False}
    count = {"name": "norm.num_batches_tracked", "type": "BatchNorm2d", "shape": (), "bytes": 8, "buffer": True}
    entries = [{**conv, "load": True, "send": True, "trained": True}]
    entries += [{**norm, "load": not local, "send": not local, "trained": True}]
    entries += [{**count, "load": not local, "send": not local, "trained": False}]
    size = sum(entry["bytes"] for entry in entries if entry["load"])
    leaves = tuple(
        Disclosure(
            name=entry["name"], source=MODEL, shape=entry["shape"], dtype="float32", bytes=entry["bytes"],
            reveals="update", receivers="all",
        )
        for entry in entries
        if entry["send"]
    )  # fmt: skip
    return MethodSummary(
        name=method,
        text=f"{method}()",
        entries=tuple(entries),
        down=size,
        up=size,
        leaves=leaves,
        kept="nothing",
        has_global=not local,
    )


@pytest.fixture(scope="session")
def make_study():
    """A study from the hits of its last round; every earlier round has half of them.

    ``scores`` maps each method to one mapping from client to hits for each seed; ``validation``, of the same form but
    with a list over rounds in place of the hits, overrides the validation data, which otherwise equal the test data.
    """

    def make(scores=LAST, *, rounds=2, select="last", validation=None, names=None, keep=lambda row: True, **fields):
        rows, traffic = [], []
        seeds = tuple(range(max(map(len, scores.values()), default=0)))
        for method, runs in scores.items():
            for seed, run in enumerate(runs):
                for number in range(1, rounds + 1):
                    traffic.append({"method": method, "seed": seed, "round": number, "down": 1000, "up": 500})
                    for client, last in run.items():
                        hits = last if number == rounds else last // 2
                        held = validation[method][seed][client][number - 1] if validation else hits
                        key = (method, seed, number, client)
                        rows.append(training(*key, loss=1 / number))
                        rows.append(evaluation(*key, "validation", "personal", held, SUPPORT[client]))
                        rows.append(evaluation(*key, "test", "personal", hits, SUPPORT[client]))
                        if facts(method).has_global:
                            rows.append(evaluation(*key, "test", "global", hits - 10, SUPPORT[client]))
        names = names or {"a": "a", "b": "b"}
        kept = [{**row, "client": names[row["client"]]} for row in rows if keep(row)]
        defaults = {
            "name": "study",
            "methods": {method: facts(method) for method in scores},
            "seeds": seeds,
            "rounds": rounds,
            "select": select,
            "clients": {names[name]: {"train": 700, "test": sum(support)} for name, support in SUPPORT.items()},
            "classes": 2,
            "rows": rows_to_frame(kept),
            "traffic": pd.DataFrame(traffic, columns=["method", "seed", "round", "down", "up"]),
            "config": {"training": {"epochs": 1, "batch_size": 32}, "seeds": list(seeds)},
            "environment": {"python": "3.12"},
            "samples": {
                names["a"]: np.zeros((3, 8, 8, 1), np.uint8),
                names["b"]: np.full((2, 200, 100, 3), 9, np.uint8),
            },
        }
        return RunSummary(**(defaults | fields))

    return make


@pytest.fixture
def study(make_study):
    return make_study()


@pytest.fixture
def make_crowd(make_study):
    """A study of ``clients`` clients with 100 test samples each: in the last round, client k has k mod 101 right."""

    def make(clients, seeds=1, **fields):
        names = [f"client {number}" for number in range(clients)]
        rows = []
        for method in ("fedavg", "fedbn"):
            for seed in range(seeds):
                for number in (1, 2):
                    for place, name in enumerate(names):
                        hits = place % 101 if number == 2 else 0
                        rows.append(training(method, seed, number, name, loss=1 / number))
                        rows.append(evaluation(method, seed, number, name, "test", "personal", hits, SUPPORT["a"]))
        sizes = {name: {"train": 10 + place, "test": 100} for place, name in enumerate(names)}
        images = {name: np.zeros((1, 4, 4, 1), np.uint8) for name in names}
        none = dict.fromkeys(("fedavg", "fedbn"), [{}] * seeds)
        return make_study(none, **{"rows": rows_to_frame(rows), "clients": sizes, "samples": images} | fields)

    return make


@pytest.fixture
def make_counted(make_study):
    """A study of one round in which method m has ``hits[m, s, c]`` of ``sizes[c]`` right at client c with seed s."""

    def make(hits, sizes, **fields):
        rows = [
            evaluation(f"method {m}", s, 1, f"client {c}", "test", "personal", int(right), (int(sizes[c]), 0))
            for (m, s, c), right in np.ndenumerate(hits)
        ]
        none = {f"method {m}": [{}] * hits.shape[1] for m in range(hits.shape[0])}
        clients = {f"client {c}": {"train": 9, "test": int(size)} for c, size in enumerate(sizes)}
        return make_study(none, rounds=1, **{"rows": rows_to_frame(rows), "clients": clients, "samples": {}} | fields)

    return make


EDGE_CASES = {
    "ten methods": {"scores": {f"fedbn+fedprox+method_{number}": LAST["fedbn"] for number in range(10)}},
    "one method": {"scores": {"fedbn": LAST["fedbn"]}},
    "one seed": {"scores": {method: runs[:1] for method, runs in LAST.items()}},
    "one round": {"rounds": 1},
    "forty rounds": {"rounds": 40},
    "one run stopped early": {"keep": lambda row: (row["method"], row["seed"]) != ("fedbn", 2) or row["round"] == 1},
    "one method not begun": {"keep": lambda row: row["method"] != "fedbn"},
    "nothing measured": {"keep": lambda row: False},
    "training only": {"keep": lambda row: row["moment"] == "trained"},
    "a client never measured": {"keep": lambda row: (row["method"], row["client"]) != ("fedbn", "a")},
    "odd names": {"names": {"a": "<b>$x$ & 'y'</b>", "b": "macro"}, "name": "<script>", "note": "1 < 2"},
    "other script": {"names": {"a": "病院", "b": "b" * 60}},
    "no traffic": {"traffic": pd.DataFrame(columns=["method", "seed", "round", "down", "up"])},
}


@dataclass(frozen=True, kw_only=True)
class Shown:
    """A study's page, and each figure of it with its SVG."""

    page: str
    drawn: list[tuple[Figure, str]]


@pytest.fixture(scope="session")
def show():
    """The page of the study called ``name``, made once: drawing takes most of the time of these tests."""
    known = {}

    def rendered(name, study):
        if name not in known:
            drawn, svg = [], html.to_svg
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(html, "to_svg", lambda figure: drawn.append((figure, svg(figure))) or drawn[-1][1])
                whole = page.render_page(study)
            panels = [(figure, text) for figure, text in drawn if figure.get_figwidth() > 1]  # not the legend's entries
            known[name] = Shown(page=whole, drawn=panels)
        return known[name]

    return rendered


@pytest.fixture
def blank(monkeypatch):
    """Leave each figure of the page empty; its description stays."""
    monkeypatch.setattr(html, "to_svg", lambda _: '<svg xmlns="http://www.w3.org/2000/svg"></svg>')


SELDOM = {
    "one round",
    "one seed",
    "forty rounds",
    "one run stopped early",
    "a client never measured",
    "no traffic",
    "other script",
}
"""Edge cases whose pages are tested by slow tests, because drawing takes most of the time."""


@pytest.fixture(params=[pytest.param(each, marks=pytest.mark.slow) if each in SELDOM else each for each in EDGE_CASES])
def edge_case(request, make_study):
    return make_study(**EDGE_CASES[request.param])


@pytest.fixture
def shown(request, edge_case, show):
    """The page of the edge case."""
    return show(request.node.callspec.params["edge_case"], edge_case)


@pytest.fixture
def plain(study, show):
    return show("plain", study)
