"""ABIDE I: autism versus control from the correlations of brain regions at rest, one client for each hospital.

Di Martino et al. 2014 (Mol. Psychiatry 19), as preprocessed by the Preprocessed Connectomes Project (Craddock et al.
2013): a time series of the 111 regions of the Harvard-Oxford atlas for every subject. A sample is the upper triangle of
their Pearson correlations, not transformed; a region without signal has correlation 0.

FedBN (Li et al. 2021, arXiv:2102.07623, appendix D.4) uses NYU, UM_1, USM and UCLA_1. Its table 10 has 167, 88, 52 and
63 subjects, 73, 43, 33 and 37 of them with autism. These are the subjects for whom none of the 111 regions is constant
and whose series has the usual length of their site. Its 5,995 features are the pairs of 110 regions. FedBN does not say
which region it omitted; here it is ``#3455``, which lacks a signal in 237 of 1,035 subjects (the next one in 36).
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ...utils.errors import UsageError, unknown_name
from ...utils.files import open_regular
from ...utils.random_streams import stream
from ..federation import ClientData, Federation
from ..formats import explain_errors, read_csv, read_npz
from ..partition import split_stratified
from ..samples import Samples
from ._card import make_card

_SITES = ("NYU", "UM_1", "USM", "UCLA_1")
_REGIONS = 111
_LEFT_OUT = "#3455"
_SUFFIX = "_rois_ho.1D"
_PHENOTYPES = "Phenotypic_V1_0b_preprocessed1.csv"
_COMPACT = ("connectome", "y", "site", "site_names", "dead_rois", "n_frames", "roi_ids")

Floats = NDArray[np.float32]


class _Subject(NamedTuple):
    """A subject's label (1: autism), series length, number of regions without signal, and values of 110 regions.

    ``values``: the series ``[T, 110]``, or the correlations of all of it ``[1, 5995]``.
    """

    label: int
    frames: int
    dead: int
    values: Floats


def _find(folder: Path) -> Path | None:
    files = (folder / "abide_ho.npz", folder / _PHENOTYPES, folder / "ABIDE_pcp" / _PHENOTYPES)
    return next((file for file in files if file.is_file()), None)


CARD = make_card("abide", find=_find, lacks=lambda found: frozenset({"window"} if found.suffix == ".npz" else ()))


def abide(
    root: Path,
    *,
    sites: tuple[str, ...] = _SITES,
    window: int | None = None,
    complete: bool = True,
    test_fraction: float = 0.2,
    seed: int = 0,
) -> Federation:
    """Load ABIDE I, one client for each of ``sites``.

    Args:
        root: Directory of the data.
        sites: Names of the sites.
        window: Length in frames of a sliding window with one sample per position (FedBN: 32, a total of 63,550 samples
            or 1.5 GB), which needs the time series; None: one sample per subject.
        complete: Keep only subjects for whom every region has a signal and whose series has the site's usual length.
        test_fraction: Fraction of each site's subjects with each label used for testing, with all their windows.
        seed: Seed of the split.

    Returns:
        Clients with samples float32 ``[N, 5995]``, correlations of 110 regions; label 1 is autism.

    Raises:
        UsageError: An option is invalid, a site is unknown, or files cannot be read.

    """
    if window is not None and window < 3:
        raise UsageError(f"window={window} frames: must be at least 3, the paper's is 32")
    if not sites:
        raise UsageError("sites=() names no site")
    found: Path = CARD.locate("abide", root, frozenset({"window"} if window is not None else ()))
    packed = found.suffix == ".npz"
    if packed and window is not None:
        raise UsageError(f"window={window}: {found} holds correlations of whole series; windows need the time series")
    clients, notices = [], []
    for site, subjects in (_read_packed if packed else _read_site_series)(found, sites).items():
        usual = Counter(subject.frames for subject in subjects).most_common(1)[0][0]
        kept = [s for s in subjects if not complete or (s.dead == 0 and s.frames == usual)]
        short = next((subject for subject in kept if subject.frames < (window or 0)), None)
        if short is not None:
            raise UsageError(f"window={window}: a subject of {site} has {short.frames} frames")
        y = np.array([subject.label for subject in kept], dtype=np.int64)
        splits = {}
        drawn = split_stratified(y, test_fraction, stream(seed, "abide", site))
        for part, rows in zip(("train", "test"), drawn, strict=True):
            values = [kept[row].values if packed else _compute_correlations(kept[row].values, window) for row in rows]
            x, label = np.concatenate(values), np.repeat(y[rows], list(map(len, values)))
            splits[part] = Samples(x=torch.from_numpy(x), y=torch.from_numpy(label))
        clients.append(ClientData.from_splits(site, splits))
        if len(kept) < len(subjects):
            notices.append(
                f"client {site!r}: {len(subjects) - len(kept)} incomplete subjects of {len(subjects)} left out"
            )
    what = "subjects" if window is None else f"windows of {window} frames"
    return Federation(
        name="abide", clients=tuple(clients), classes=2,
        note=f"ABIDE I, {what}, correlations of {_REGIONS - 1} regions", class_names=("control", "autism"),
        notices=tuple(notices),
    )  # fmt: skip


def _read_packed(file: Path, sites: Sequence[str]) -> dict[str, list[_Subject]]:
    """Return the subjects of each site in ``abide_ho.npz``."""
    arrays = read_npz(file, _COMPACT)
    names, regions = arrays["site_names"].tolist(), arrays["roi_ids"]
    kept = (regions != _LEFT_OUT)[np.stack(np.triu_indices(_REGIONS, 1))].all(axis=0)
    found = {}
    for site in sites:
        if site not in names:
            raise unknown_name("site", site, names)
        rows = np.flatnonzero(arrays["site"] == names.index(site))
        x = arrays["connectome"][rows][:, None, kept].astype(np.float32)
        facts = (arrays[name][rows].astype(int).tolist() for name in ("y", "n_frames", "dead_rois"))
        found[site] = [_Subject(*subject) for subject in zip(*facts, x, strict=True)]
    return found


def _read_site_series(phenotypes: Path, sites: Sequence[str]) -> dict[str, list[_Subject]]:
    """Return the subjects of each site in the project's table, whose series are in a file with their ``FILE_ID``."""
    files: dict[str, Path] = {}
    for file in sorted(phenotypes.parent.rglob(f"*{_SUFFIX}")):
        other = files.setdefault(file.name.removesuffix(_SUFFIX), file)
        if other != file:
            raise UsageError(f"{other} and {file} are of one subject: keep the files of one pipeline and strategy")
    rows = read_csv(
        phenotypes,
        "a table of subjects",
        lambda row: (row["SITE_ID"], row["FILE_ID"], {"1": 1, "2": 0}[row["DX_GROUP"]]),
    )
    found: dict[str, list[_Subject]] = {site: [] for site in sites}
    for site, name, label in rows:
        if site in found and name != "no_filename":
            if name not in files:
                raise UsageError(
                    f"{phenotypes} names {name}, but {name}{_SUFFIX} is not below {phenotypes.parent}: "
                    f"get the series of all subjects of {site}, or leave the site out (sites)"
                )
            regions, x_TR = _read_series(files[name])
            dead = int((np.ptp(x_TR, axis=0) == 0).sum())
            values = x_TR[:, [region != _LEFT_OUT for region in regions]]
            found[site].append(_Subject(label=label, frames=len(x_TR), dead=dead, values=values))
    for site, subjects in found.items():
        if not subjects:
            raise unknown_name("site", site, {site for site, _, _ in rows})
    return found


def _read_series(file: Path) -> tuple[list[str], Floats]:
    """Return region names and values ``[T, 111]`` of a file with a line ``#10<tab>#11...`` and a line per frame."""
    with explain_errors(file, "a time series of regions"), open_regular(file) as content:
        lines = io.TextIOWrapper(content, encoding="ascii")
        regions = next(lines).split()
        x_TR = np.loadtxt(lines, dtype=np.float32, ndmin=2)
    if len(regions) != _REGIONS or x_TR.shape[1:] != (_REGIONS,):
        raise UsageError(f"{file} has {len(regions)} regions, the Harvard-Oxford atlas there {_REGIONS}: get it again")
    return regions, x_TR


def _compute_correlations(x_TR: Floats, window: int | None) -> Floats:
    """Return Pearson correlations ``[W, R (R - 1) / 2]`` of the regions in each window; 0 for constant regions."""
    length = len(x_TR) if window is None else window
    z_WRT = np.lib.stride_tricks.sliding_window_view(x_TR.astype(np.float64), length, axis=0)
    constant_WR1 = np.ptp(z_WRT, axis=2, keepdims=True) == 0
    z_WRT = np.where(constant_WR1, 0, z_WRT - z_WRT.mean(axis=2, keepdims=True))
    norm_WR1 = np.linalg.norm(z_WRT, axis=2, keepdims=True)
    z_WRT = z_WRT / np.where(constant_WR1, 1, norm_WR1)
    above = np.triu_indices(x_TR.shape[1], 1)
    return (z_WRT @ z_WRT.transpose(0, 2, 1))[:, above[0], above[1]].astype(np.float32)
