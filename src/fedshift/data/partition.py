"""Splits: functions that return a change of a federation; several changes are applied in order.

``iid(clients=100)``, ``dirichlet(clients=10, alpha=0.3)`` and similar partitions distribute the pooled samples of all
clients or, with ``within='domain'``, the samples of each client (domain) separately. Training and validation samples
are distributed in the same way. Test samples are shared, so that every client is tested on all of them; with
``test='same'``, they are distributed by the same shares. No sample is lost or repeated, arrays are shared and not
copied, and every draw has a keyed stream.

Groups (such as the samples of one patient) stay whole. A group counts as its most frequent class, with all its samples.
Groups are put into random order, and each goes to the client whose share of that class contains its middle. Client
sizes therefore follow the shares up to the size of one group of each class, and labels as far as groups have one label.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from ..utils.errors import UsageError, unknown_name
from ..utils.random_streams import stream
from .federation import ClientData, Federation
from .samples import Samples

Change = Callable[[Federation], Federation]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Shares = Callable[[Ints, int, np.random.Generator], Floats]
"""Function of labels ``[N]``, the number of classes and a generator that returns each client's share of all samples
``[clients]`` or of each class ``[classes, clients]``."""
Within = Literal["all", "domain"]
Test = Literal["shared", "same"]


def iid(*, clients: int, within: Within = "all", test: Test = "shared", seed: int = 0) -> Change:
    """Distribute shuffled samples in equal parts; ``within='domain'`` cuts each domain into ``clients`` parts."""
    return _partition("iid", clients, within, test, seed, lambda *_: np.full(clients, 1 / clients))


def quantity(
    *, clients: int, alpha: float = 1.0, minimum: int = 1, within: Within = "all", test: Test = "shared", seed: int = 0
) -> Change:
    """Draw sizes with proportions from a symmetric Dirichlet distribution (quantity skew), and labels at random.

    A small ``alpha`` gives very unequal sizes (Li et al. 2022, arXiv:2102.02079, section 4.3).
    """
    _require_positive(alpha=alpha)
    return _partition(
        "quantity", clients, within, test, seed, lambda _, __, rng: rng.dirichlet(np.full(clients, alpha)), minimum
    )


def dirichlet(
    *, clients: int, alpha: float, minimum: int = 1, within: Within = "all", test: Test = "shared", seed: int = 0
) -> Change:
    """Distribute each class with proportions from a symmetric Dirichlet distribution (label skew; Hsu et al. 2019).

    With a smaller ``alpha``, clients have fewer classes (arXiv:1909.06335, here with classes distributed to clients as
    in Yurochkin et al. 2019, arXiv:1905.12022). Clients with fewer than ``minimum`` samples receive random samples from
    the largest clients, so that the draw ends for every ``alpha``.
    """
    _require_positive(alpha=alpha)
    return _partition(
        "dirichlet", clients, within, test, seed, lambda _, n, rng: rng.dirichlet(np.full(clients, alpha), n), minimum
    )


def labels(*, clients: int, per_client: int, within: Within = "all", test: Test = "shared", seed: int = 0) -> Change:
    """Give each client L = ``per_client`` labels (Non-IID-L of FedMMB, arXiv:2011.07006, section 4.1).

    Samples are grouped by label, each of the C groups is cut into K L / C parts, and each of the K clients receives L
    parts of different labels, at random. K L must be a multiple of C.
    """
    _require_whole("labels", per_client=per_client)

    def shares(_: Ints, classes: int, rng: np.random.Generator) -> Floats:
        if not 1 <= per_client <= classes or clients * per_client % classes:
            raise UsageError(
                f"labels(clients={clients}, per_client={per_client}): {classes} classes are cut into clients x "
                f"per_client / {classes} parts each, so per_client must lie in 1..{classes} and the product be a "
                f"multiple of {classes}: try per_client={classes if classes < 3 else 2}, clients={classes}"
            )
        parts = clients * per_client // classes
        left, share = np.full(classes, parts), np.zeros((classes, clients))
        for client in range(clients):
            # fullest first, so that no label is left over
            chosen = np.lexsort((rng.random(classes), -left))[:per_client]
            left[chosen] -= 1
            share[chosen, client] = 1 / parts
        return share

    return _partition("labels", clients, within, test, seed, shares)


HAM = {"a": (2367, ("mel",)), "b": (3376, ("bcc", "akiec", "vasc", "df")), "c": (2269, ("bkl",))}
"""Sizes and minority classes of the clients in HAM-Non-IID; the rest are nevi, the majority at every client."""


def ham_non_iid(*, test: Test = "shared", seed: int = 0) -> Change:
    """Distribute HAM10000 to clients of 2, 5 and 2 classes (HAM-Non-IID of FedMMB, arXiv:2011.07006, section 4.3).

    They have 2367, 3376 and 2269 of 8,012 training images (in proportion for other totals), with nevi as the majority.
    The paper does not say which classes each client has besides nevi; melanoma, the four rarest, and keratosis are our
    choice.
    """

    def change(data: Federation) -> Federation:
        names = {name.lower(): place for place, name in enumerate(data.class_names)}
        needed = ["nv", *(name for _, others in HAM.values() for name in others)]
        if missing := [name for name in needed if name not in names]:
            raise UsageError(
                f"ham_non_iid() deals out the seven classes of HAM10000, but {data.name!r} has no class "
                f"{missing[0]!r}: use it with data=ham10000"
            )

        def shares(y: Ints, *_: object) -> Floats:
            wanted = np.array([size for size, _ in HAM.values()]) / sum(size for size, _ in HAM.values()) * len(y)
            rare = [[names[name] for name in others] for _, others in HAM.values()]
            nevi = np.maximum(wanted - [np.isin(y, each).sum() for each in rare], 0)
            share = np.zeros((len(names), len(HAM)))
            for client, classes in enumerate(rare):
                share[classes, client] = 1
            share[names["nv"]] = nevi / nevi.sum()
            return share

        made = _partition("ham_non_iid", len(HAM), "all", test, seed, shares)(data)
        return replace(made, clients=tuple(replace(c, name=n) for c, n in zip(made.clients, HAM, strict=True)))

    return change


def domain_mix(*, clients: int, mixing: float, keep: str = "", test: Test = "shared", seed: int = 0) -> Change:
    """Spread domains over ``clients`` clients, from one domain each (``mixing=0``) to identical mixtures (1).

    Heterogeneous partitioning (Bai et al. 2024, "Benchmarking Algorithms for Federated Domain Generalization",
    arXiv:2307.04942; formulas from its authors' code, ``NonIIDSplitter`` in
    https://github.com/inouye-lab/FedDG_Benchmark, where ``mixing`` is ``iid``). If there are at most as many domains as
    clients, each domain has a main client, and the remaining clients are assigned one by one to the domain with the
    most samples per client; otherwise, domains are assigned, largest first, to the client with the fewest samples. A
    client receives 1 - ``mixing`` of its part of its main domains, and ``mixing`` / ``clients`` of every domain.
    ``keep``: domains, by name or pattern, that remain unchanged as clients, such as one for ``--newcomers``.
    """
    if not isinstance(mixing, int | float) or not 0 <= mixing <= 1:
        raise UsageError(f"domain_mix(mixing={mixing!r}): give a number from 0, one domain a client, to 1, all alike")
    _require_whole("domain_mix", clients=clients)

    def change(data: Federation) -> Federation:
        kept = match_names(keep, data.names) if keep else ()
        mixed = tuple(client for client in data.clients if client.name not in kept)
        if not mixed:
            raise UsageError(f"domain_mix(keep={keep!r}) keeps every domain: leave some to be mixed")
        main_DC = _allot_domains([len(client.train) for client in mixed], clients)
        share_DC = (1 - mixing) * main_DC + mixing / clients
        deal = _partition("domain_mix", clients, "all", test, seed, lambda *_: share_DC, by_domain=True)
        made = deal(replace(data, clients=mixed))
        return replace(made, clients=(*made.clients, *(client for client in data.clients if client.name in kept)))

    return change


def _allot_domains(sizes: Sequence[int], clients: int) -> Floats:
    """Return each client's share of its main domains ``[domains, clients]``, for domains with these ``sizes``."""
    main_DC = np.zeros((len(sizes), clients))
    if len(sizes) > clients:
        for domain in np.argsort(sizes, kind="stable")[::-1]:
            main_DC[domain, int((np.array(sizes) @ main_DC).argmin())] = 1
        return main_DC
    each_D = np.ones(len(sizes), dtype=np.int64)
    while each_D.sum() < clients:
        each_D[int((np.array(sizes) / each_D).argmax())] += 1
    main_DC[np.repeat(np.arange(len(sizes)), each_D), np.arange(clients)] = 1
    return main_DC / each_D[:, None]


def only(*, clients: str) -> Change:
    """Keep the clients whose names match one of the patterns: ``only(clients='mnist-*,usps-0')``."""
    if not isinstance(clients, str):
        raise UsageError(f"only(clients={clients!r}): give names and patterns as one text, with commas between them")
    return lambda data: data.select_clients(match_names(clients, data.names))


def sample(*, size: int | None = None, fraction: float | None = None) -> Change:
    """Keep ``size`` training samples of each client, or a ``fraction`` (FedBN's sweep of local sizes, figure 4)."""
    _require_one("sample", size, fraction)
    if fraction is not None and not 0 < fraction <= 1:
        raise UsageError(f"sample(fraction={fraction:g}): must lie in (0, 1]")

    def change(data: Federation) -> Federation:
        return data.limit_samples(
            {c.name: max(1, round(fraction * len(c.train))) if fraction else size or 0 for c in data.clients}
        )

    return change


def truncate() -> Change:
    """Reduce each client at random to the size of the smallest (FedBN, section 5.1)."""
    return lambda data: data.limit_samples(min(len(client.train) for client in data.clients))


def repeat(*, seed: int = 0) -> Change:
    """Repeat samples of smaller clients until all have as many as the largest, so that all take equally many steps.

    FedBN's setting for unequal data (arXiv:2102.07623, appendix E.6, tables 15 and 16).
    """

    def change(data: Federation) -> Federation:
        most, clients = max(len(client.train) for client in data.clients), []
        for client in data.clients:
            rng, count = stream(seed, "split/repeat", client.name), len(client.train)
            index = np.concatenate([rng.permutation(count) for _ in range(-(-most // count))])[:most]
            clients.append(replace(client, train=client.train.take(torch.from_numpy(index))))
        return replace(data, clients=tuple(clients))

    return change


def validation(*, fraction: float | None = None, size: int | None = None) -> Change:
    """Hold out ``size`` training samples of each client, or a ``fraction``, for model selection."""
    _require_one("validation", size, fraction)
    if fraction is not None:
        _require_positive(fraction=fraction)
    return lambda data: data.hold_out(fraction, size=size)


CHANGES: tuple[Callable[..., Change], ...] = (
    dirichlet, domain_mix, ham_non_iid, iid, labels, only, quantity, repeat, sample, truncate, validation,
)  # fmt: skip
"""All functions above."""


def split_stratified(
    y: NDArray[np.int64], fraction: float, rng: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Split the indices of labels ``y`` ``[N]`` into remaining and drawn indices, both ascending.

    From a class with n samples, ``fraction * n`` (rounded) are drawn; if n is 2 or more, at least one is drawn and at
    least one remains. A single sample remains. Raises :class:`UsageError` for a ``fraction`` outside 0..1.
    """
    if not 0 < fraction < 1:
        raise UsageError(f"test_fraction={fraction:g}: must lie between 0 and 1")
    drawn = np.zeros(len(y), dtype=bool)
    for label in np.unique(y):
        places = rng.permutation(np.flatnonzero(y == label))
        drawn[places[: min(len(places) - 1, max(1, round(fraction * len(places))))]] = True
    return np.flatnonzero(~drawn), np.flatnonzero(drawn)


def match_names(patterns: str | Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    """Return the names that match ``patterns``, a sequence or separated by commas, in the order of the patterns.

    A pattern is a name or has ``*``, ``?`` and ``[...]`` as in file names. After ``!`` it excludes what it matches;
    with only such patterns, all other names match. Raises :class:`UsageError` if a pattern, or all, match no name.
    """
    if patterns in names:
        return (str(patterns),)
    known = frozenset(names)

    def expand(pattern: str) -> list[str]:
        matched = [pattern] if pattern in known else [name for name in names if fnmatchcase(name, pattern)]
        if not matched:
            raise unknown_name("client", pattern, names)
        return matched

    texts = [text.strip() for text in (patterns.split(",") if isinstance(patterns, str) else patterns)]
    left_out = {name for text in texts if text.startswith("!") for name in expand(text[1:])}
    order = [name for text in texts if not text.startswith("!") for name in expand(text)] or list(names)
    if left_out.issuperset(order):
        raise UsageError(f"{patterns!r} excludes all clients: {', '.join(names)}")
    return tuple(name for name in dict.fromkeys(order) if name not in left_out)


def _partition(
    name: str, clients: int, within: Within, test: Test, seed: int, shares: Shares, minimum: int = 1,
    *, by_domain: bool = False,
) -> Change:  # fmt: skip
    """Return the change that distributes samples to ``clients`` clients by ``shares``.

    ``by_domain``: shares are of domains instead of classes.
    """
    _require_whole(name, clients=clients, minimum=minimum)
    for value, allowed in ((within, ("all", "domain")), (test, ("shared", "same"))):
        if value not in allowed:
            raise unknown_name(f"choice in {name}", value, allowed)

    def deal(whole: ClientData, data: Federation, prefix: str) -> list[ClientData]:
        draw = partial(stream, seed, f"split/{name}", prefix)
        dealt: dict[str, list[Samples]] = {}
        for part, split in whole.splits.items():
            if part == "test" and test == "shared":
                dealt[part] = [split] * clients
                continue
            strata, least = data.task.strata(split.y), minimum if part == "train" else 1
            y = np.zeros(len(split), np.int64) if strata is None else strata.numpy()
            if by_domain:
                sizes = [len(each.splits.get(part, ())) for each in data.clients]
                y = np.repeat(np.arange(len(sizes)), sizes)
                strata = split.y
                if len(y) != len(split):
                    raise UsageError(f"{name}(test='same'): clients share their {part} samples: leave it out")
            share = shares(y, data.classes, draw())
            if strata is None and share.ndim > 1:
                raise UsageError(
                    f"{name}(clients={clients}) distributes samples by their class, and for {data.task} a sample has "
                    "no single one: distribute by iid() or quantity()"
                )
            units = split.units.numpy() if split.group is not None else np.arange(len(split))
            count = int(units.max(initial=-1)) + 1
            if len(split) < clients * least or count < clients:
                hint = " or leave test='same' out" if part == "test" else ""
                what = "samples" if split.group is None else "groups"
                raise UsageError(
                    f"{name}(clients={clients}): {count} {part} {what} are too few for {least} a client: "
                    f"ask for fewer clients{hint}"
                )
            rng = draw(part)
            if split.group is None:
                cut = _top_up(_cut(y, share, rng), least, rng)
            else:
                cut = _cut_groups(units, y, share, least, rng)
            dealt[part] = [split.take(torch.from_numpy(np.sort(index))) for index in cut]
        width = len(str(clients - 1))
        return [
            ClientData.from_splits(f"{prefix or 'client-'}{k:0{width}d}", {part: own[k] for part, own in dealt.items()})
            for k in range(clients)
        ]

    def change(data: Federation) -> Federation:
        wholes = [(data.pool().clients[0], "")] if within == "all" else [(c, f"{c.name}-") for c in data.clients]
        for whole, _ in wholes:
            if len(torch.unique(whole.train.rows)) < len(whole.train):
                repeated = (c.name for c in data.clients if len(torch.unique(c.train.rows)) < len(c.train))
                raise UsageError(
                    f"{name}(clients={clients}): samples of client {next(repeated, data.names[0])!r} are repeated, and "
                    "several clients would have copies: put repeat() after it"
                )
        dealt = tuple(client for whole in wholes for client in deal(whole[0], data, whole[1]))
        return replace(data, clients=dealt).tell_shared_tests()

    return change


def _cut(y: Ints, shares: Floats, rng: np.random.Generator) -> list[Ints]:
    """Shuffle the indices of ``y`` and cut them by ``shares``, or each class by its row of ``shares``."""
    whole = shares.ndim == 1
    groups = [np.arange(len(y))] if whole else [np.flatnonzero(y == label) for label in range(len(shares))]
    cut = []
    for index, share in zip(groups, np.atleast_2d(shares), strict=True):
        edges = np.rint(np.cumsum(share) * len(index)).astype(np.int64)
        cut.append(np.split(rng.permutation(index), edges[:-1]))
    return [np.concatenate(parts) for parts in zip(*cut, strict=True)]


def _cut_groups(units: Ints, y: Ints, shares: Floats, minimum: int, rng: np.random.Generator) -> list[Ints]:
    """Cut whole groups by ``shares``, each as its most frequent class; ``units [N]``: each sample's group, 0, 1, ...

    Random groups are moved from the largest parts to parts with fewer than ``minimum`` samples. Raises
    :class:`UsageError` if groups are too large for that.
    """
    sizes = np.bincount(units)
    counts = np.zeros((len(sizes), int(y.max(initial=0)) + 1), np.int64)
    np.add.at(counts, (units, y), 1)
    label = np.zeros(len(sizes), np.int64) if shares.ndim == 1 else counts.argmax(axis=1)
    owner = np.empty(len(sizes), np.int64)
    for kind, share in enumerate(np.atleast_2d(shares)):
        index = rng.permutation(np.flatnonzero(label == kind))
        middle = np.cumsum(sizes[index]) - sizes[index] / 2
        owner[index] = np.searchsorted(np.cumsum(share)[:-1] * sizes[index].sum(), middle, side="right")
    clients = np.atleast_2d(shares).shape[1]
    for poor in range(clients):
        while (held := np.bincount(owner, sizes, clients))[poor] < minimum:
            several = np.where(np.bincount(owner, minlength=clients) > 1, held, 0)
            several[poor] = 0
            if not several.any():
                break
            owner[rng.choice(np.flatnonzero(owner == several.argmax()))] = poor
    if (np.bincount(owner, sizes, clients) < minimum).any():
        raise UsageError(
            f"{len(sizes)} groups of up to {sizes.max()} samples cannot give {clients} clients {minimum} each: ask for "
            "fewer clients, or a smaller minimum"
        )
    return [np.flatnonzero(owner[units] == client) for client in range(clients)]


def _top_up(parts: list[Ints], minimum: int, rng: np.random.Generator) -> list[Ints]:
    """Move random samples from the largest parts to parts with fewer than ``minimum``."""
    sizes = np.array([len(part) for part in parts])
    for poor in np.flatnonzero(sizes < minimum):
        while sizes[poor] < minimum:
            rich = int(sizes.argmax())
            count = min(minimum - sizes[poor], max(1, (sizes[rich] - minimum) // 2))
            shuffled = rng.permutation(parts[rich])
            parts[poor], parts[rich] = np.concatenate([parts[poor], shuffled[:count]]), shuffled[count:]
            sizes[poor], sizes[rich] = len(parts[poor]), len(parts[rich])
    return parts


def _require_one(where: str, size: int | None, fraction: float | None) -> None:
    if (size is None) == (fraction is None):
        raise UsageError(f"{where}(size={size}, fraction={fraction}): give exactly one of the two")
    if size is not None:
        _require_whole(where, size=size)


def _require_positive(**values: float) -> None:
    for name, value in values.items():
        if not isinstance(value, int | float) or not 0 < value <= 1e9:
            raise UsageError(f"{name}={value!r}: must be a number greater than 0")


def _require_whole(where: str, **values: int) -> None:
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UsageError(f"{where}({name}={value!r}): must be a whole number of 1 or more")
