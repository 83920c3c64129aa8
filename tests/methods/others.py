"""Methods as a stranger would write them, from CONTRIBUTING.md alone."""

import torch

from fedshift import Declared, Folded, Rule, Send, method
from fedshift.core.means import weighted_mean


class ClipNorm(Rule):
    limit: float

    def gradients(self, grads, step):
        norm = torch.stack([grad.norm() for grad in grads.values()]).norm()
        return {name: grad * (self.limit / norm).clamp(max=1.0) for name, grad in grads.items()}


@method
def clipped(base, *, limit=0.5):
    return base.with_rule(ClipNorm(limit))


class SmallFeatures(Rule):
    """Keeps what the classifier reads small."""

    strength: float

    def bind(self, plan):
        return Declared(self, features="last")

    def loss(self, loss, step):
        return loss + self.strength * step.features.square().mean()


@method
def small_features(base, *, strength=0.1):
    return base.with_rule(SmallFeatures(strength))


class LayerMixes(Rule):
    """Each client loads, entry by entry, a mix in which clients weigh more whose entry is near to its own."""

    aggregates = mixes = True

    def fold(self, server):
        received = server.received
        mixes = {each.client: {} for each in received}
        for name in server.network.trained & server.network.loaded:
            values = torch.stack([each.entries[name].double().flatten() for each in received])
            for each, weights in zip(received, torch.softmax(-torch.cdist(values, values), dim=1), strict=True):
                mixes[each.client][name] = weights
        return Folded(entries=server.entries, mixes=mixes)


@method
def layer_mixes(base):
    return base.with_rule(LayerMixes())


class Clusters(Rule):
    """The server holds two models; each client trains the one that fits its first samples better (IFCA)."""

    personalizes = "start"

    def bind(self, plan):
        two = {name: torch.stack([plan.initial[name], 1.1 * plan.initial[name]]) for name in plan.trained & plan.loaded}
        memory, sends = {"chosen": torch.tensor(0)}, {"chosen": Send(shape=(), dtype=torch.int64, reveals="client")}
        return Declared(self, memory=memory, server=two, samples_before_work=64, entries=True, sends=sends)

    def start(self, client):
        losses = [client.loss_at({name: both[k] for name, both in client.server.items()}) for k in range(2)]
        return {"chosen": torch.stack(losses).argmin()}

    def personalize(self, state, client):
        chosen = client.memory["chosen"].reshape(1)
        return state | {name: both.index_select(0, chosen)[0] for name, both in client.server.items()}

    def end(self, client):
        return client.memory, client.memory

    def fold(self, server):
        models = [{name: both[k] for name, both in server.memory.items()} for k in range(2)]
        for k, before in enumerate(models):
            pairs = zip(server.received, server.uploads, strict=True)
            those = [each for each, upload in pairs if upload["chosen"] == k]
            entries = [{name: each.entries[name] for name in before} for each in those]
            models[k] = weighted_mean(entries, [each.weight for each in those]) if those else before
        return Folded({name: torch.stack([model[name] for model in models]) for name in server.memory})


@method
def clusters(base):
    return base.with_rule(Clusters())


class Styles(Rule):
    """Brings each batch halfway to the mean and deviation of a client of the last round, which is drawn from a bank."""

    def bind(self, plan):
        neutral = torch.tensor([0.0, 1.0], dtype=plan.dtype)
        bank, growing = {"bank": neutral[None]}, {"bank": (0,)}
        sends = Send.like({"style": neutral}, "client", passed_on=True)
        return Declared(self, server=bank, growing=growing, samples_before_work=64, draws=True, sends=sends)

    def start(self, client):
        seen = []
        client.run({"": lambda network, given: seen.append(given[0])})
        return {"style": torch.stack([seen[0].mean(), seen[0].std()])}

    def end(self, client):
        return {}, {"style": client.memory["style"]}

    def fold(self, server):
        return Folded({"bank": torch.stack([sent["style"] for sent in server.uploads])})

    def batch(self, x, y, step):
        bank = step.server["bank"]
        mean, deviation = bank.index_select(0, (step.key % len(bank)).reshape(1))[0]
        return (x + deviation * (x - x.mean()) / x.std() + mean) / 2, y


@method
def styles(base):
    return base.with_rule(Styles())


class Mixup(Rule):
    """Trains on each sample mixed with another of the batch, by a share that each step draws."""

    def bind(self, plan):
        return Declared(self, draws=True)

    def batch(self, x, y, step):
        return torch.lerp(x, x.flip(0), (step.key % 1000 / 1000).to(x)), y

    def loss(self, loss, step):
        other = step.criterion(step.outputs, step.y.flip(0))
        return torch.lerp(loss, other, (step.key % 1000 / 1000).to(loss))


@method
def mixup(base):
    return base.with_rule(Mixup())
