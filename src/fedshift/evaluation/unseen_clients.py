"""Models for clients that never trained, under methods that keep state on clients.

``average``: the server's entries, with the seen clients' personal entries averaged by the method's weighting (FedWon,
arXiv:2306.05879, table 12). ``reestimate``: the same, but BatchNorm statistics are estimated on the newcomer's own
training inputs, without labels (FedBN, arXiv:2102.07623, appendix G). ``finetune``: the average, trained on the
newcomer's labeled data by the trial's own local work. ``finetune_bn``: the shared layers unchanged, and BatchNorm
alone learned on that data (FedBN's appendix G, for a client that joins during training). ``nearest``: the model of the
seen client that fits the newcomer's training data best. Averaging and comparing models requires access to all clients'
entries, which a simulation has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..core.aggregation import StreamingMean
from ..core.kernel import ClientState, ServerState, global_state, init_client, personal_state
from ..core.plan import Plan, compute_outputs
from ..core.preparation import add_extra_entries
from ..core.selection import batch_norm, norm_statistics
from ..core.work import Work
from ..data.augmentation import Augmentation
from ..data.samples import Samples
from ..engines.sequential import Sequential
from ..tasks.classification import CLASSIFICATION
from ..tasks.task import Task
from ..utils.errors import UsageError
from ..utils.random_streams import stream
from ..utils.state import State, clone, pick
from .metrics import BATCH, evaluate


def has_statistics(plan: Plan) -> bool:
    """Return whether the model has BatchNorm statistics under ``plan``, which ``reestimate`` requires."""
    return any(map(norm_statistics, plan.entries))


def list_batch_norm_parameters(plan: Plan) -> frozenset[str]:
    """Return the trained parameters of BatchNorm layers under ``plan``, which ``finetune_bn`` learns."""
    return frozenset(entry.name for entry in plan.entries if batch_norm(entry)) & plan.trained


def check_policy(plan: Plan, policy: str, training: Mapping[str, Samples]) -> None:
    """Raise :class:`UsageError` where ``policy`` cannot work under ``plan`` for newcomers with ``training`` data."""
    if policy == "reestimate" and not has_statistics(plan):
        raise UsageError(
            f"unseen='reestimate' estimates BatchNorm statistics, of which the model has none under "
            f"{plan.method.name}: use 'average', 'nearest' or 'finetune'"
        )
    if policy == "finetune_bn" and not list_batch_norm_parameters(plan):
        raise UsageError(
            f"unseen='finetune_bn' learns weight and bias of BatchNorm layers, of which the model has none under "
            f"{plan.method.name}: use 'average', 'nearest' or 'finetune'"
        )
    for name, split in training.items() if policy in ("finetune", "finetune_bn") else ():
        if len(split) < plan.smallest_batch:
            raise UsageError(
                f"client {name!r} has one training sample, over which batch normalization has no variance: it cannot "
                f"be trained on ({policy!r}); leave the client out, or use 'average' or 'nearest'"
            )


class UnseenClientModels:
    """Models for clients that never trained, made from the state of ``server`` and of clients that did.

    ``samples``: number of training samples of each trained client, by its name in ``clients``, which are read one at a
    time. ``augment``: augmentation of images on which a model is trained. ``measured``: the federation's task and its
    number of classes; None: classification.
    """

    def __init__(
        self, plan: Plan, server: ServerState, clients: Mapping[str, ClientState], samples: Mapping[str, int],
        augment: Augmentation | None = None, measured: tuple[Task, int] | None = None,
    ) -> None:  # fmt: skip
        self.plan, self.server, self.augment, self._measured = plan, server, augment, measured
        self._clients, self._samples = clients, samples

    def make_state(self, policy: str, name: str, train: Samples, rounds: int = 1) -> State | None:
        """Return the model of client ``name`` with training data ``train``; None under ``skip`` or before any training.

        ``rounds``: rounds of local work of ``finetune`` and ``finetune_bn``. Under a method with one global model,
        ``average`` is that model. Raises ``Diverged`` where fine-tuning does.
        """
        if policy == "skip" or not (self._samples or (self.plan.has_global and policy != "nearest")):
            return None
        if policy == "nearest":
            return self._find_nearest(train)
        if policy == "finetune":
            return self._train_locally(self.plan, self._averaged, name, train, rounds)
        if policy == "finetune_bn":
            return self._learn_batch_norm(name, train, rounds)
        return reestimate_statistics(self.plan, self._averaged, train) if policy == "reestimate" else self._averaged

    def _find_nearest(self, train: Samples) -> State:
        models = (personal_state(self.plan, self._clients[name], self.server) for name in sorted(self._samples))
        measured = self._measured or (CLASSIFICATION, int(train.y.max()) + 1)

        def loss(state: State) -> float:
            found = float(evaluate(self.plan, state, train, *measured)["loss_sum"])
            return math.inf if math.isnan(found) else found

        return min(models, key=loss)

    def _train_locally(self, plan: Plan, start: State, name: str, train: Samples, rounds: int) -> State:
        """Return ``start`` after local work as in a client's first rounds, at the learning rate of the last round.

        The client loads its own uploads, as in a federation of one.
        """
        client = init_client(add_extra_entries(replace(plan, initial=start)))
        server = replace(self.server, round=max(0, self.server.round - 1), shared=pick(start, plan.sent))
        engine = Sequential(plan, {name: train}, plan.seed, augment=self.augment)
        for _ in range(rounds):
            trained = engine.train_client(server, name, client)
            client, server = trained.client, replace(server, shared=trained.update.shared)
        return personal_state(plan, client, server)

    def _learn_batch_norm(self, name: str, train: Samples, rounds: int) -> State:
        """Return the model of a client that joins now, with BatchNorm learned on its data and all else unchanged.

        Personal entries of BatchNorm begin as each client's did, shared ones as on the server. Statistics are estimated
        on its inputs; then weight and bias are trained with the run's batches, optimizer and loss, and the statistics
        are updated as in training. The method's rules do not apply.
        """
        plan = self.plan
        own = frozenset(entry.name for entry in plan.entries if batch_norm(entry))
        start = reestimate_statistics(plan, {**self._averaged, **pick(plan.initial, own & plan.personal)}, train)
        method = replace(plan.method, rules=())
        alone = replace(plan, method=method, trained=list_batch_norm_parameters(plan), extra_params=(), extra_rest=())
        return {**start, **pick(self._train_locally(alone, start, name, train, rounds), own)}

    @cached_property
    def _averaged(self) -> State:
        state = global_state(self.plan, self.server)
        if state is not None:
            return state
        averaged = {**pick(self.server.shared, self.plan.loaded), **self._averaged_entries()}
        return {name: averaged[name] for name in self.plan.initial}

    def _averaged_entries(self) -> State:
        """Return the mean of the clients' personal entries, loading one client at a time."""
        mean = StreamingMean()
        for name in sorted(self._samples):
            mean.add(self._clients[name].personal, self.plan.method.weigh(self._samples[name]))
        return mean.result()


def make_lone_state(
    plan: Plan, server: ServerState, policy: str, name: str, train: Samples, augment: Augmentation | None,
    measured: tuple[Task, int],
) -> State | None:  # fmt: skip
    """Return the model of client ``name`` where no other client's entries are at hand: at a site that never trained.

    Where the server holds a whole model, or lacks nothing but BatchNorm statistics that ``reestimate`` replaces, it is
    that of :class:`UnseenClientModels`; the parameters are the same. None under ``skip``. Raises :class:`UsageError`
    naming what is possible where the policy needs other clients' entries, or samples that the client lacks.
    """
    if policy == "skip":
        return None
    kept = frozenset(entry.name for entry in plan.entries if not norm_statistics(entry)) & plan.personal
    if policy == "nearest" or (not plan.has_global and (policy != "reestimate" or kept)):
        possible = "'average', 'reestimate' or 'finetune'" if plan.has_global else "" if kept else "'reestimate'"
        raise UsageError(
            f"unseen={policy!r} takes entries that {plan.method.name} keeps at its clients, which never leave them: "
            "use " + (possible or "a method with a global model, or one that keeps BatchNorm statistics alone (silobn)")
        )
    if policy != "average" and len(train) < max(1, plan.smallest_batch):
        raise UsageError(f"unseen={policy!r} takes training samples, of which client {name!r} has {len(train)}")
    if not plan.has_global:
        return reestimate_statistics(plan, {**plan.initial, **pick(server.shared, plan.loaded)}, train)
    return UnseenClientModels(plan, server, {}, {}, augment, measured).make_state(policy, name, train)


class _Moments:
    """Mean and variance of each channel over all batches ``[B, C, ...]`` together (Chan et al. 1979)."""

    def __init__(self) -> None:
        self.count, self.mean, self.squares = 0, torch.zeros(()), torch.zeros(())

    def __call__(self, _: nn.Module, given: tuple[Tensor, ...]) -> None:
        x = given[0].double()
        count, together = x.numel() // x.shape[1], self.count + x.numel() // x.shape[1]
        variance, mean = torch.var_mean(x, dim=[0, *range(2, x.ndim)], correction=0)
        gap = mean - self.mean
        self.squares = self.squares + variance * count + gap.square() * (self.count * count / together)
        self.mean, self.count = self.mean + gap * (count / together), together


@torch.no_grad()
def reestimate_statistics(plan: Plan, state: State, data: Samples) -> State:
    """Return ``state`` with BatchNorm statistics replaced by mean and variance of each layer's inputs over ``data``.

    Labels are not used. Layers normalize by batches of 250 samples in a keyed order, so that with more samples the
    inputs of a second BatchNorm layer depend on the batches. With fewer samples than the model can be trained on,
    ``state`` is returned unchanged.
    """
    state, scratch = dict(state), clone(state)  # layers in training mode update their buffers
    layers = {name: layer for name, layer in plan.module.named_modules() if isinstance(layer, _BatchNorm)}
    layers = {name: layer for name, layer in layers.items() if layer.running_mean is not None}
    if len(data) < plan.smallest_batch or not layers:
        return state
    order = torch.from_numpy(stream(plan.seed, "reestimate").permutation(len(data))).to(data.y.device)
    found = {name: _Moments() for name in layers}
    plan.module.eval()
    for layer in layers.values():
        layer.train()
    hooks = [layer.register_forward_pre_hook(found[name]) for name, layer in layers.items()]
    try:
        for start, stop in Work(batch_size=BATCH, epochs=1).batch_bounds(len(data), plan.smallest_batch):
            compute_outputs(plan, scratch, data.inputs(order[start:stop], plan.dtype))
    finally:
        for hook in hooks:
            hook.remove()
    for name, moments in found.items():
        mean, variance = f"{name}.running_mean".lstrip("."), f"{name}.running_var".lstrip(".")
        state[mean] = moments.mean.to(state[mean])
        state[variance] = (moments.squares / (moments.count - 1)).to(state[variance])
    return state
