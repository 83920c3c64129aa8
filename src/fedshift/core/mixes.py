"""Mixes: per-client weighted means of a round's uploads, which clients load instead of the server's entries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..utils.errors import UsageError
from ..utils.state import State, entries_under, group_entries, join_states, split_state
from .means import cast_to, weighted_mean


@dataclass(frozen=True, kw_only=True, eq=False)
class Mixes:
    """Mixes of a round's uploads, one for each client in ``weights``; other clients load the server's entries.

    The server stores the uploads of one round and the weights, not a model per client: each mix is computed when it is
    sent.

    Args:
        uploads: The entries that clients load, in the order of the participants.
        weights: Weights by client and entry (``""``: all entries not named): float64 ``[uploads]``, or
            ``[uploads, *entry.shape]`` for elementwise weights. They sum to one over the uploads. Clients load entries
            without weights from the server.

    """

    uploads: tuple[State, ...]
    weights: Mapping[str, State]

    def mix(self, client: str) -> State:
        """Return the entries that ``client`` loads instead of the server's."""
        rows, mixed = self.weights.get(client, {}), {}
        for name in self.uploads[0] if rows else ():
            row = rows.get(name, rows.get(""))
            if row is None:
                continue
            values = [upload[name] for upload in self.uploads]
            if row.ndim == 1:
                mixed[name] = weighted_mean([{name: value} for value in values], row.tolist())[name]
            else:
                first = values[0].double()
                parts = (w * (value.double() - first) for w, value in zip(row.to(first.device), values, strict=True))
                mixed[name] = cast_to(first + sum(parts), values[0].dtype)
        return mixed

    def check(self, what: str) -> None:
        """Raise :class:`UsageError`, prefixed by ``what``, if weights do not fit the uploads."""
        count = len(self.uploads)
        for client, rows in self.weights.items():
            for name, row in rows.items():
                where = f"{what} mixes entry {name!r} of client {client!r}"
                if name and name not in self.uploads[0]:
                    raise UsageError(f"{where}, which clients do not load: name entries that they load, or '' for all")
                whole = (count, *self.uploads[0][name].shape) if name else (count,)
                if row.shape not in ((count,), whole):
                    raise UsageError(f"{where} with weights of shape {tuple(row.shape)}: give {(count,)} or {whole}")
                if not torch.allclose(row.double().sum(dim=0), row.new_ones((), dtype=torch.float64), atol=1e-6):
                    raise UsageError(
                        f"{where} with weights that do not sum to one over the {count} uploads: normalize them"
                    )

    def flatten(self) -> State:
        """Return all tensors in one state."""
        uploads = join_states(map(str, range(len(self.uploads))), self.uploads)
        weights = join_states(self.weights, self.weights.values())
        return join_states(("weights", "uploads"), (weights, uploads))

    @staticmethod
    def unflatten(state: State) -> Mixes | None:
        """Invert :meth:`flatten`; return None for an empty state."""
        weights = group_entries(entries_under("weights", state))
        count = max((len(row) for rows in weights.values() for row in rows.values()), default=0)
        uploads = split_state(map(str, range(count)), entries_under("uploads", state))
        return Mixes(uploads=uploads, weights=weights) if weights else None
