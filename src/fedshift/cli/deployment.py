"""The commands for an experiment across machines: ``pki``, ``serve``, ``join`` and ``ledger``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from ..config.given_settings import find_settings, read_settings, select_settings
from ..config.settings_file import read_run_settings
from ..config.spec import CompareSpec, RunOptions, RunSpec
from ..console.terminal import choose_directory, make_console, print_line
from ..utils.errors import UsageError
from ..utils.files import require_writable

if TYPE_CHECKING:
    from ..flower.site.record import Entry


def pki(directory: Path, *, host: Annotated[list[str] | None, Parameter(negative=())] = None, days: int = 825) -> int:
    """Make the coordinator's certificate, or renew it; sites make their own keys.

    Args:
        directory: The coordinator's directory of keys, which becomes readable only by its owner.
        host: Name or IP address by which sites reach the coordinator; may be given several times. By default the names
            in the previous certificate.
        days: Validity of the certificate in days; the authority's is ten years.

    """
    from ..flower.keys import make_certificate

    console, end = make_console(), make_certificate(directory, _split_names(host or ()), days)
    print_line(console, f"The certificate in {directory} is valid until {end:%Y-%m-%d} (UTC). To each site: ca.crt")
    print_line(
        console,
        "Each site makes its own key, ssh-keygen -t ecdsa -b 384 -N '' -f NAME, and keeps it; its NAME.pub comes into "
        f"{directory}/nodes",
    )
    return 0


def serve(
    config: Path | None = None,
    *,
    min_clients: int = 2,
    tls: Path | None = None,
    insecure: Annotated[bool, Parameter(negative=())] = False,
    force_insecure: Annotated[bool, Parameter(negative=())] = False,
    host: str | None = None,
    port: int = 9091,
    round_timeout: float = 3600.0,
    wait: float = 86400.0,
    update_bound: float = 10.0,
    max_share: float = 1.0,
    metrics: int | None = None,
    log: str | None = None,
    code: Annotated[list[str] | None, Parameter(negative=())] = None,
    out: Path | None = None,
    resume: Path | None = None,
    from_round: int | None = None,
    quiet: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Coordinate an experiment across machines: wait for sites to `fedshift join`, and train with them.

    Args:
        config: TOML file of settings, as for `fedshift run` or `compare`, without data, which the sites have. Not with
            --resume.
        min_clients: Sites that must connect before the first round, and minimum number of uploads in a round.
        tls: Directory that `fedshift pki` made, with the sites' public keys in nodes/.
        insecure: Plain text and no keys, in place of --tls; listens on this machine only.
        force_insecure: With --insecure, also listen for other machines: anyone on the network path can read and change
            models.
        host: Address to listen on; by default 0.0.0.0, all IPv4 addresses of this machine (`::` for IPv6), or 127.0.0.1
            with --insecure.
        port: Port to listen on.
        round_timeout: Seconds after which a round is closed with the uploads received.
        wait: Seconds to wait for the first --min-clients sites.
        update_bound: Maximum length of a site's update, as a multiple of the others'; larger ones are excluded. 0: no
            limit.
        max_share: Greatest weight of one site among three or more, however many samples it claims. 1: no limit.
        metrics: Port on this machine's loopback interface that serves progress to Prometheus; by default none.
        log: Loggers, comma-separated: tensorboard, mlflow, wandb, or none; by default as in the settings.
        code: Function on this machine, package.module:function, that the settings file may use as method or model; may
            be given several times. No others are called.
        out: Directory to write; by default a new one under runs/.
        resume: Directory of an interrupted run to continue, bit for bit.
        from_round: With --resume, go back to the model after this round, one of the last three, and repeat those after
            it: for a site that has lost its state of a later one.
        quiet: Do not print progress or notes; the notes are on the page.

    """
    if (config is None) == (resume is None):
        raise UsageError("give either a settings file or --resume with the directory of a run")
    if from_round is not None and resume is None:
        raise UsageError(f"from_round={from_round} goes back in a run: name it (--resume)")
    place = RunOptions(config=config, out=out, resume=resume, quiet=quiet, code=tuple(code or ()))
    directory = choose_directory(place, "serve")
    _require_one_way(tls, insecure=insecure)
    from ..experiments.loggers import parse_loggers, require_packages
    from ..flower.coordinator.remote_engine import RoundOptions
    from ..flower.coordinator.serve import ListenOptions
    from ..flower.coordinator.serve import serve as coordinate
    from ..results.run_directory import MACHINES
    from ..results.summary import holds_run

    path = find_settings(config, resume)
    if resume and holds_run(resume) and not (resume / MACHINES).is_dir():
        raise UsageError(f"{resume} was not run across machines: continue it with `fedshift run` or `compare` --resume")
    names = [field.name for kind in (RunSpec, CompareSpec) for field in fields(kind)]
    values = select_settings(read_run_settings(resume).values, path, names) if resume else read_settings(path, names)
    spec = _make_spec(values | ({} if log is None else {"log": log}), path)
    require_packages(parse_loggers(spec.log))
    rounds = RoundOptions(
        clients=min_clients, seconds=round_timeout, wait=wait, update_bound=update_bound, max_share=max_share
    )
    listen = ListenOptions(
        host=host or ("127.0.0.1" if insecure else "0.0.0.0"),
        port=port,
        tls=tls,
        forced=force_insecure,
        metrics=metrics,
    )
    for options in (rounds, listen):
        options.check()
    return coordinate(spec, listen, rounds, place, directory, from_round)


def join(
    address: str,
    *,
    data: str | None = None,
    name: str | None = None,
    tls: Path | None = None,
    key: Path | None = None,
    insecure: Annotated[bool, Parameter(negative=())] = False,
    check: Annotated[bool, Parameter(negative=())] = False,
    state: Path | None = None,
    device: str = "cpu",
    threads: int | None = None,
    code: Annotated[list[str] | None, Parameter(negative=())] = None,
    weights: Path | None = None,
    export: Path | None = None,
    poll: float | None = None,
    policy: Path | None = None,
    target: str | None = None,
    columns: str | None = None,
    groups: str | None = None,
    task: str | None = None,
    account: Path | None = None,
    keep_rounds: int = 50,
    max_bytes_per_round: int | None = None,
    confirm: Annotated[bool, Parameter(negative=())] = False,
    validate_only: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Take part in an experiment across machines with one site's data, which never leave it.

    Args:
        address: HOST:PORT of the coordinator.
        data: Data of the site: a directory of class folders (or train and test folders with these), an .npz file or a
            table; by default the path in the policy.
        name: Name of the site; by default the name of its key, or of its data.
        tls: Directory with ca.crt, from the coordinator.
        key: The site's private key: ssh-keygen -t ecdsa -b 384 -N '' -f NAME.
        insecure: Plain text and no key, in place of --tls and --key.
        check: Only connect, and print whether key, certificate and clock are right; no data are needed.
        state: Directory of the site's state between rounds; by default sites/NAME. Without it the site cannot continue.
        device: Torch device: cpu, cuda, cuda:1.
        threads: Threads of torch; by default torch's own choice.
        code: Function on this machine, package.module:function, that the experiment may use as method or model; may be
            given several times. No others are called.
        weights: File of the experiment's initial weights, if it has any: the same file as the coordinator's.
        export: Directory for the site's model after the last round, with a model card, as from `fedshift export`.
        poll: Seconds between two requests to the coordinator; by default 3, as in Flower.
        policy: TOML file that states what this site offers ([data]), discloses ([told]) and forbids ([limits]), and
            which experiments it accepts.
        target: Column of the table that may be predicted; for several labels or numbers, separated by commas.
        columns: Columns of the table that a model may see, comma-separated; by default all that have no other role.
        groups: Column (or pattern of file names) that identifies patients; it never leaves the site, and samples of a
            patient stay together.
        task: Prediction task that the site offers: multilabel, regression, ...; by default the task of the data, for a
            table classification.
        account: File that records and counts all that leaves of the data; by default record.db next to the site's
            directory.
        keep_rounds: Rounds of each method and seed whose states are kept, so that a coordinator can be restored from a
            copy that is so many rounds old.
        max_bytes_per_round: Most bytes of entries that a round may move, to and from this site together, repeated
            messages included; by default any number.
        confirm: Show the description of the data before it is first sent, and before each method and seed the
            experiment and the entries that will leave the site; continue only after the answer y.
        validate_only: Train nothing and upload no entries: measure the models that this site would use.

    """
    _require_one_way(tls, insecure=insecure)
    from ..flower.site.join import CoordinatorLink, check_link
    from ..flower.site.join import join as take_part

    link = CoordinatorLink(address=address, tls=tls, key=key, poll=poll)
    link.check()
    if check:
        return check_link(link)
    from ..flower.site.policy import SitePolicy

    offered = {"target": target, "columns": columns and _split_names([columns]), "groups": groups, "task": task}
    offers = (SitePolicy.read(policy) if policy else SitePolicy()).offering(path=data, **offered)
    offers = offers.limiting(bytes_per_round=max_bytes_per_round)
    data = offers.data.path
    if data is None:
        raise UsageError("no data are named: give --data, or path in [data] of the policy")
    path = Path(data)
    called = name or (key.stem if key else (path.resolve().name if path.is_dir() else path.stem))
    folder = state or Path("sites") / called
    for place in filter(None, (folder, export)):
        require_writable(place)
    from ..data.sources import find_data
    from ..flower.site.site import Site

    if keep_rounds < 3:
        raise UsageError(f"keep_rounds={keep_rounds}: must be at least 3, for rounds that are repeated")
    if confirm and not sys.stdin.isatty():
        raise UsageError("--confirm asks at a terminal, and there is none: leave it out, and give limits with --policy")
    find_data(data)
    if not path.exists() and name is None and key is None:
        raise UsageError(f"data {data!r} are several clients: choose one with --name")
    if export:
        from ..export.package import require_models

        require_models(export)
    site = Site(
        data, called, folder, device=device, code=frozenset(code or ()), weights=str(weights) if weights else None,
        export=export, validates=validate_only, policy=offers, confirm=_ask if confirm else None,
        account=account, keep_rounds=keep_rounds, coordinator=address,
    )  # fmt: skip
    return take_part(link, site, folder, threads)


def ledger(
    path: Path, *, as_json: Annotated[bool, Parameter(name="--json", negative=())] = False, since: int = 0
) -> int:
    """Show and verify a site's record: what left, who agreed to it, what was refused, and the totals.

    Args:
        path: The site's record: record.db next to its directory.
        as_json: Print the entries as JSON, one per line.
        since: Show entries after this number; all are verified.

    """
    from ..flower.site.record import FILE, Record

    if not path.is_file():
        raise UsageError(
            f"{path} is no record of a site: name {FILE}, which is next to the site's directory (in sites)"
        )
    console, record, last, revealed = make_console(), Record(path), None, dict[str, None]()
    for last in record.read():
        if last.number > since:
            print_line(console, json.dumps(asdict(last)) if as_json else _describe_entry(last))
        revealed |= dict.fromkeys(last.content.get("discloses", ()))
    if not as_json:
        for text in (*(f"left with a round's upload: {text}" for text in revealed), *record.list_totals()):
            print_line(console, text)
        print_line(console, f"No entry was changed or removed; last digest: {last.digest if last else 'none'}")
    return 0


def _describe_entry(entry: Entry) -> str:
    """Return an entry as one line."""
    from ..report.formatting import format_bytes

    content, left = entry.content, entry.content.get("left", {}).values()
    entries, size = (sum(record[key] for record in left) for key in ("entries", "bytes"))
    trial = f" {content['name']}, {entry.trial}, round {entry.round}" if entry.trial else ""
    parts = [f"{entries} entries, {format_bytes(size)}"] if left else []
    parts += [f"{len(content['rows'])} measurements"] if content.get("rows") else []
    parts += [f"{content['who']} was shown: {content['shown'].splitlines()[0]}"] if "who" in content else []
    parts += [content["why"]] if "why" in content else []
    return f"{entry.number} {entry.time} {entry.event}{trial}: {'; '.join(parts) or 'no entries'}"


def _require_one_way(tls: Path | None, *, insecure: bool) -> None:
    if (tls is None) != insecure:
        raise UsageError("give either --tls DIR (see `fedshift pki`) or --insecure, for plain text")


def _make_spec(settings: dict[str, Any], path: Path) -> RunSpec | CompareSpec:
    if "method" in settings and "methods" in settings:
        raise UsageError(f"{path} has both method and methods: leave one of them out")
    if settings.get("split"):
        raise UsageError(
            f"{path}: split divides data that are in one place, but each site has its data already: leave it out"
        )
    return CompareSpec(**settings) if "methods" in settings else RunSpec(**settings)


def _ask(text: str, question: str) -> bool:
    """Show ``text``, and return whether the user answered ``question`` with yes."""
    console = make_console()
    print_line(console, text)
    return console.input(f"{question} [y/N] ", markup=False).strip().lower() in ("y", "yes")


def _split_names(texts: Iterable[str]) -> list[str]:
    """Return the names in ``texts``; a text may contain several, comma-separated."""
    return [name.strip() for text in texts for name in text.split(",") if name.strip()]
