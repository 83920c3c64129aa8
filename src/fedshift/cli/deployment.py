"""The commands for an experiment across machines: ``serve``, ``join``, ``check``, ``ledger`` and ``pki``."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from ..config.given_settings import find_settings, read_settings, select_settings
from ..config.settings_file import read_run_settings
from ..config.spec import CompareSpec, RunOptions, RunSpec
from ..console.printing import Console
from ..console.terminal import choose_directory, make_console, print_line
from ..utils.errors import UsageError
from ..utils.files import require_writable

if TYPE_CHECKING:
    from ..flower.transport.chain import Entry
    from ..flower.transport.pki import Authority

pki = App(name="pki", help="Make the keys and certificates of a federation across machines.")


@pki.command
def init(
    directory: Path, *, host: Annotated[list[str], Parameter(negative=())], nodes: str = "", days: int = 825
) -> int:
    """Make an authority, the coordinator's certificate and the nodes' keys in a new directory.

    Args:
        directory: New or empty directory, which becomes readable only by its owner.
        host: Name or IP address of the coordinator for nodes; may be given several times.
        nodes: Comma-separated names of the nodes; `fedshift pki add` makes keys for more.
        days: Validity of the coordinator's certificate in days; the authority's is ten years.

    """
    from ..flower.transport.pki import make_authority

    made = make_authority(directory, _split_names(host), _split_names([nodes]), days)
    console = make_console()
    _explain_certificate(console, directory, made)
    print_line(console, f"To the coordinator: ca.crt server.crt server.key nodes/*.pub, all of {directory}")
    _explain_delivery(console, made.names)
    print_line(
        console,
        "ca.key stays here: it signs the coordinator's next certificate (fedshift pki renew), and whoever has it can "
        "pose as the coordinator. Without it, a certificate that ends needs a new authority and new files everywhere.",
    )
    return 0


@pki.command
def add(directory: Path, *names: str) -> int:
    """Make keys for more nodes.

    Args:
        directory: Directory that `fedshift pki init` made.
        names: Names of the nodes.

    """
    from ..flower.transport.pki import add_nodes

    console, made = make_console(), add_nodes(directory, names)
    print_line(console, f"To the coordinator: {' '.join(f'nodes/{name}.pub' for name in made)}, of {directory}")
    _explain_delivery(console, made)
    return 0


@pki.command
def renew(
    directory: Path,
    *,
    host: Annotated[list[str] | None, Parameter(negative=())] = None,
    days: int = 825,
    new_key: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Make a new certificate for the coordinator under the same authority, so that sites keep their files.

    Args:
        directory: Directory that `fedshift pki init` made, with ca.key.
        host: Name or IP address of the coordinator for nodes; may be given several times. By default the names in the
            previous certificate.
        days: Validity of the certificate in days.
        new_key: Replace the coordinator's key too; sites that allow it by its fingerprint must allow the new one. This
            does not help after a theft: a stolen key stays valid with its certificate until you make a new authority.

    """
    from ..flower.transport.pki import renew_certificate

    made, console = renew_certificate(directory, _split_names(host or ()), days, new_key=new_key), make_console()
    _explain_certificate(console, directory, made)
    what = "server.crt server.key" if new_key else "server.crt"
    print_line(console, f"To the coordinator: {what}, of {directory}, between two runs of `fedshift serve --resume`")
    return 0


@pki.command
def rotate(directory: Path, name: str) -> int:
    """Make a new key for a node, under its name.

    Args:
        directory: Directory that `fedshift pki init` made.
        name: Name of the node.

    """
    from ..flower.transport.pki import rotate_key

    rotate_key(directory, name)
    console = make_console()
    print_line(console, f"To {name}: nodes/{name}.key, of {directory}")
    print_line(console, f"Then to the coordinator: nodes/{name}.pub, and `fedshift serve` refuses the old key at once")
    return 0


@pki.command
def revoke(directory: Path, name: str) -> int:
    """Remove a node's key, at the coordinator while `fedshift serve` runs, which refuses the node from then on.

    Args:
        directory: The coordinator's directory of keys, and the one that `fedshift pki init` made.
        name: Name of the node.

    """
    from ..flower.transport.pki import revoke_key

    revoke_key(directory, name)
    print_line(
        make_console(),
        f"The key of {name} is no longer in {directory}: a `fedshift serve` that reads it refuses {name} at once",
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
    max_share: float = 0.5,
    metrics: int | None = None,
    alert: str | None = None,
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
        tls: Directory that `fedshift pki init` made, or the coordinator's part of it.
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
        alert: Command (JSON on its standard input) or http(s) address (POST) that hears when a site is left out,
            training diverges, a round stalls or the experiment fails.
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
    if (tls is None) != insecure:
        raise UsageError("give either --tls DIR (see `fedshift pki init`) or --insecure, for plain text")
    from ..experiments.loggers import parse_loggers, require_packages
    from ..flower.server.serve import ListenOptions
    from ..flower.server.serve import serve as coordinate
    from ..results.run_directory import MACHINES
    from ..results.summary import holds_run

    path = find_settings(config, resume)
    if resume and holds_run(resume) and not (resume / MACHINES).is_dir():
        raise UsageError(f"{resume} was not run across machines: continue it with `fedshift run` or `compare` --resume")
    names = [field.name for kind in (RunSpec, CompareSpec) for field in fields(kind)]
    values = select_settings(read_run_settings(resume).values, path, names) if resume else read_settings(path, names)
    spec = _make_spec(values | ({} if log is None else {"log": log}), path)
    require_packages(parse_loggers(spec.log))
    reach = ListenOptions(
        host=host or ("127.0.0.1" if insecure else "0.0.0.0"), port=port, tls=tls, clients=min_clients,
        seconds=round_timeout, wait=wait, update_bound=update_bound, max_share=max_share,
        forced=force_insecure, metrics=metrics, alert=alert,
    )  # fmt: skip
    reach.check()
    return coordinate(spec, reach, place, directory, from_round)


def join(
    address: str,
    *,
    data: str | None = None,
    name: str | None = None,
    tls: Path | None = None,
    key: Path | None = None,
    insecure: Annotated[bool, Parameter(negative=())] = False,
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
    keep_gb: float = 1.0,
    max_bytes_per_round: int | None = None,
    confirm: Annotated[bool, Parameter(negative=())] = False,
    validate_only: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Take part in an experiment across machines with one site's data, which never leave it.

    Args:
        address: HOST:PORT of the coordinator.
        data: Data of the site: a directory of class folders (or train and test with these), an .npz file or a table; by
            default the path in the policy.
        name: Name of the site; by default the name of its key, or of its data.
        tls: Directory with ca.crt, from `fedshift pki init`.
        key: The site's private key, from `fedshift pki init`.
        insecure: Plain text and no key, in place of --tls and --key.
        state: Directory of the site's state between rounds; by default sites/NAME. Without it the site cannot continue.
        device: Torch device: cpu, cuda, cuda:1.
        threads: Threads of torch; by default torch's own choice.
        code: Function on this machine, package.module:function, that the experiment may use as method or model; may be
            given several times. No others are called.
        weights: File of the experiment's initial weights, if it has any: the same file as the coordinator's.
        export: Directory for the site's model after the last round, with a model card, as from `fedshift export`.
        poll: Seconds between two requests to the coordinator; by default 3, as in Flower.
        policy: TOML file that states what this site offers ([data]), discloses ([told]) and forbids ([limits]), and
            which coordinators and experiments it accepts.
        target: Column of the table that may be predicted; for several labels or numbers, separated by commas.
        columns: Columns of the table that a model may see, comma-separated; by default all that have no other role.
        groups: Column (or pattern of file names) that identifies patients; it never leaves the site, and samples of a
            patient stay together.
        task: Prediction task that the site offers: multilabel, regression, ...; by default the task of the data, for a
            table classification.
        account: File that counts uploads, measurements and descriptions of the data; by default account.json next to
            the site's directory.
        keep_rounds: Earlier rounds of each method and seed whose states are kept, so that a coordinator can be restored
            from a copy that is so many rounds old.
        keep_gb: Disk space for these states, in GB (1e9 bytes); the last three of each method and seed are always kept.
        max_bytes_per_round: Most bytes of entries that a round may move, to and from this site together, repeated
            messages included; by default any number.
        confirm: Show the description of the data before it is first sent, and before each method and seed the
            experiment and the entries that will leave the site; continue only after the answer y.
        validate_only: Train nothing and upload no entries: measure the models that this site would use.

    """
    if (tls is None) != insecure:
        raise UsageError(
            "give either --tls DIR and --key FILE (see `fedshift pki init`), or --insecure, for plain text"
        )
    from ..flower.site.policy import SitePolicy

    listed = columns.split(",") if columns else None
    offered = {"target": target, "columns": listed and _split_names(listed), "groups": groups, "task": task}
    offers = (SitePolicy.read(policy) if policy else SitePolicy()).offering(path=data, **offered)
    offers = offers.limiting(bytes_per_round=max_bytes_per_round)
    data = offers.data.path
    if data is None:
        raise UsageError("no data are named: give --data, or path in [data] of the policy")
    path = Path(data)
    called = name or (key.stem if key else (path.resolve().name if path.is_dir() else path.stem))
    folder = state or Path("sites") / called
    require_writable(folder)
    if export:
        require_writable(export)
    from ..data.sources import find_data
    from ..flower.site.gate import Confirmation
    from ..flower.site.join import CoordinatorLink
    from ..flower.site.join import join as take_part
    from ..flower.site.site import Site
    from ..flower.site.site_state import Retention

    if keep_rounds < 0 or not 0 <= keep_gb < math.inf:
        raise UsageError(
            f"keep_rounds={keep_rounds}, keep_gb={keep_gb:g}: both must be numbers of at least 0 (the last three "
            "states are always kept)"
        )
    if confirm and not sys.stdin.isatty():
        raise UsageError("--confirm asks at a terminal, and there is none: leave it out, and give limits with --policy")
    find_data(data)
    if not path.exists() and name is None and key is None:
        raise UsageError(f"data {data!r} are several clients: choose one with --name")
    link = CoordinatorLink(address=address, tls=tls, key=key, poll=poll)
    link.check()
    if export:
        from ..export.package import require_models

        require_models(export)
    given = str(weights) if weights else None
    site = Site(
        data, called, folder, device=device, code=frozenset(code or ()), weights=given, export=export,
        validates=validate_only, policy=offers, confirmation=Confirmation(_ask) if confirm else None, account=account,
        retention=Retention(rounds=keep_rounds, bytes=int(keep_gb * 1e9)),
    )  # fmt: skip
    if tls and key:
        from ..flower.transport.signatures import Verifier, load_private_key

        site.checked, site.key = Verifier(tls / "ca.crt", link.host), load_private_key(key)
    return take_part(link, site, folder, threads)


def check(address: str, *, tls: Path, key: Path, state: Path | None = None, size: float | None = None) -> int:
    """Check a site's machine and network before it joins: one line for each point, with the fix where it fails.

    Args:
        address: HOST:PORT of the coordinator, where `fedshift serve` runs.
        tls: Directory with ca.crt, from `fedshift pki init`.
        key: The site's private key, from `fedshift pki init`.
        state: Directory that will hold the site's state; by default below sites.
        size: Size of the model in megabytes, for estimates; by default the coordinator reports it once it knows.

    """
    if size is not None and not 0 < size < 1e6:
        raise UsageError(f"--size {size:g}: must be a number of megabytes, more than 0 and less than a million")
    from ..flower.site.check import SKIPPED, Checks
    from ..flower.site.join import CoordinatorLink

    link = CoordinatorLink(address=address, tls=tls, key=key, poll=None)
    link.check()
    console, failed = make_console(), 0
    for found in Checks(link, state or Path("sites"), None if size is None else int(size * 1e6)).run():
        failed += bool(found.fix)
        status = "FAILED" if found.fix else "-" if found.what == SKIPPED else "ok"
        print_line(console, f"{status:6} {found.what}: {found.text}")
        if found.fix:
            print_line(console, f"       fix: {found.fix}")
    return 1 if failed else 0


def ledger(
    path: Path,
    *,
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
    since: int = 0,
    key: Annotated[list[Path] | None, Parameter(negative=())] = None,
    anchors: Path | None = None,
    account: Path | None = None,
) -> int:
    """Show and verify a site's ledger: what was asked, what was sent, who agreed to it, and what was spent in all.

    Args:
        path: The site's folder, from `fedshift join --state`.
        as_json: Print the entries as JSON, one per line, with everything reported and the digests of the data sent.
        since: Show entries after this number; all are verified.
        key: The site's key (.pub or .key), with which each entry must be signed; may be given several times. By default
            the keys that the site wrote next to its ledger.
        anchors: The coordinator's record of this ledger, machines/ledgers.jsonl in its run directory; each confirms
            the other.
        account: File that counts uploads, measurements and descriptions of the data; by default account.json next to
            the site's directory.

    """
    from ..flower.site.account import FILE
    from ..flower.site.ledger import compare_anchors, count_bytes_left, list_versions, read_ledger
    from ..flower.transport.chain import load_key
    from ..report.formatting import format_bytes

    console, entries = make_console(), []
    for entry in read_ledger(path, list(map(load_key, key)) if key else None):
        entries.append(entry)
        if entry.number <= since:
            continue
        said = {"number": entry.number, "digest": entry.digest, **entry.content}
        print_line(console, json.dumps(said) if as_json else f"{entry.number} {_describe_entry(entry)}")
    confirmed = compare_anchors(entries, anchors, path) if anchors else ""
    if as_json:
        return 0
    for text in dict.fromkeys(text for entry in entries for text in entry.content.get("discloses", ())):
        print_line(console, f"left with a round's upload: {text}")
    for text in _describe_account(account or path.resolve().parent / FILE):
        print_line(console, text)
    for text in list_versions(entries):
        print_line(console, text)
    first, last = (entries[0].number, entries[-1]) if entries else (1, None)
    if first > 1:
        print_line(console, f"The first entry here is number {first}: earlier files are elsewhere.")
    if confirmed:
        print_line(console, confirmed)
    total = format_bytes(sum(map(count_bytes_left, entries)))
    signed = ", ".join(sorted({entry.signed for entry in entries}))
    print_line(
        console,
        f"{len(entries)} entries; {total} left. The chain is unbroken, and "
        + (f"each entry is signed with {signed}" if signed else "not signed: no key is known (--key)")
        + f"; last digest: {last.digest if last else 'none'}",
    )
    return 0


def _describe_entry(entry: Entry) -> str:
    """Return an entry of a ledger as one line."""
    from ..flower.site.ledger import VALIDATES, count_bytes_left
    from ..flower.transport.exchange import BACK
    from ..report.formatting import format_bytes

    said = entry.content
    if said["event"] == BACK:
        return (
            f"{said['time']} the coordinator's record of ledgers went back from {said['had']} entries to "
            f"{said['has']}: it was restored from an older copy, or rewritten"
        )
    if said["event"] == "consent":
        shown = said["shown"].splitlines()
        return f"{said['time']} {said['who']} was shown {len(shown)} lines and {_agreed(said['agreed'])}: {shown[0]}"
    role = f" ({VALIDATES})" if said["role"] == VALIDATES else ""
    round = "" if said["round"] is None else f", round {said['round']}"
    if again := said.get("again"):
        back = f", after the coordinator went back from round {again}" if again > said["round"] else ""
        round += f" (again{back})"
    left = ", ".join(f"{kind}: {each['entries']} entries" for kind, each in said["left"].items() if each["entries"])
    what = f"{left}, {format_bytes(count_bytes_left(entry))}" if left else "no entries"
    return f"{said['time']} {said['asked']}{round}: {said['answered']}; {what}{role}"


def _agreed(agreed: bool) -> str:
    return "agreed" if agreed else "did not agree"


def _describe_account(path: Path) -> list[str]:
    """Return what a site's data were used for, as lines of text."""
    from ..flower.site.account import read_books

    books, unsigned = read_books(path)
    lines = [
        f"{', '.join(book.paths)}: {book.count('uploads')} uploads, {book.count('evaluations')} measurements and "
        f"{book.count('descriptions')} different descriptions in all, of {len(book.trials)} methods and seeds"
        for book in books
    ]
    return [*lines, f"{unsigned} questions were not signed by the coordinator, and refused"] if books else lines


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


def _explain_certificate(console: Console, directory: Path, made: Authority) -> None:
    from ..flower.transport.chain import load_key
    from ..flower.transport.signatures import fingerprint

    print_line(
        console, f"The coordinator's certificate is for {', '.join(made.hosts)}, until {made.until:%Y-%m-%d} (UTC)."
    )
    whose = fingerprint(load_key(directory / "server.crt"))
    print_line(console, f"Fingerprint of its key, for the coordinators that a site's policy allows: {whose}")


def _explain_delivery(console: Console, names: tuple[str, ...]) -> None:
    for name in names:
        print_line(console, f"To {name}: ca.crt nodes/{name}.key")
    if names:
        print_line(console, "A key belongs to one machine: carry it there by a safe way, and keep no copy.")
