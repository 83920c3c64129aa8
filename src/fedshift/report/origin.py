"""Origin of a run's numbers: what was trained, where, when and how long, and the settings other than the defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from datetime import datetime
from typing import Any

from ..config.spec import CompareSpec, RunSpec, SweepSpec
from ..results.schema import RunSummary
from .formatting import MISSING

DEFAULTS = {field.name: field.default for kind in (SweepSpec, CompareSpec, RunSpec) for field in fields(kind)}
"""Default of every setting."""
NAMED = ("data", "method", "methods")
"""Settings that are always listed with the non-default ones."""


def describe_run(summary: RunSummary) -> dict[str, str]:
    """Return facts about the training so far, by name: resolved settings, engine, times, command and version."""
    traffic, sessions = summary.traffic, summary.environment.get("sessions", [])
    facts = dict(summary.resolved)
    if len(traffic) and "engine" in traffic:
        engines = traffic.groupby("method", sort=False)["engine"].unique()
        texts = {method: ", ".join(names) for method, names in engines.items()}
        same = len(set(texts.values())) == 1
        facts["engine"] = next(iter(texts.values())) if same else "; ".join(f"{m}: {t}" for m, t in texts.items())
    if sessions:
        facts["started"] = _format_time(sessions[0]["started"])
    if len(traffic) and "ended" in traffic:
        facts["last round ended"] = _format_time(max(traffic["ended"]))
        facts["duration of all rounds"] = format_duration(float(traffic["elapsed"].sum()))
    if commands := [session["command"] or "from Python" for session in sessions]:
        facts["command"] = commands[0]
        facts |= {f"resumed with ({number})": command for number, command in enumerate(commands[1:], start=1)}
    if packages := summary.environment.get("packages"):
        ran = dict.fromkeys(session.get("version", packages.get("fedshift", "")) for session in sessions)
        named = {"fedshift": " and ".join(ran) or packages.get("fedshift"), "torch": packages.get("torch")}
        facts["versions"] = ", ".join(f"{name} {version}" for name, version in named.items() if version)
    return facts


def find_changed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the non-default settings of ``config``, and the settings in :data:`NAMED`."""
    return {
        name: value
        for name, value in config.items()
        if name in NAMED or name not in DEFAULTS or value != DEFAULTS[name]
    }


def format_duration(seconds: float) -> str:
    """Return seconds as ``2 h 03 min``, ``4 min 05 s`` or ``6.1 s``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{minutes} min {rest:02d} s"


def _format_time(text: str) -> str:
    """Return an ISO time as ``2026-11-20 10:15 UTC``; a dash if unknown."""
    return f"{datetime.fromisoformat(text):%Y-%m-%d %H:%M} UTC" if text else MISSING
