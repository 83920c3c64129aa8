"""What ``benchmarks/peers.py`` measures: one federated work done by fedshift, the plain loop and other libraries.

Each function does ``options.rounds`` rounds in the way its library documents and returns the seconds of each round and
the final model's state. Libraries are imported where they are used: a process measures one and may lack the others.
"""

from __future__ import annotations

import asyncio
import functools
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from plain import PlainLoop
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fedshift.models.mlp import fnn2

CLIENTS, SAMPLES, BATCH, LR = 10, 3000, 50, 0.1
Outcome = tuple[list[float], dict[str, Tensor]]


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a run is done: rounds, threads, fedshift's engine, and whether batches are sliced beforehand."""

    rounds: int
    threads: int
    engine: str
    ready: bool


@functools.cache
def data() -> list[tuple[Tensor, Tensor]]:
    """Each client's inputs ``[3000, 784]`` and labels ``[3000]``; made once a process."""
    random = torch.Generator().manual_seed(0)
    return [
        (torch.randn(SAMPLES, 784, generator=random), torch.randint(10, (SAMPLES,), generator=random))
        for _ in range(CLIENTS)
    ]


@functools.cache
def ready_batches(client: int) -> list[tuple[Tensor, Tensor]]:
    x, y = data()[client]
    return list(zip(x.split(BATCH), y.split(BATCH), strict=True))


def loader(client: int, ready: bool, shuffle: bool) -> Any:
    if ready:
        return ready_batches(client)
    return DataLoader(TensorDataset(*data()[client]), batch_size=BATCH, shuffle=shuffle)


def network() -> nn.Module:
    """2FNN with the weights that all begin with."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return fnn2((784,), 10)


def timed(round_: Callable[[], object], rounds: int) -> list[float]:
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        round_()
        seconds.append(time.perf_counter() - began)
    return seconds


def between(marks: list[float]) -> list[float]:
    return [after - before for before, after in pairwise(marks)]


def fedshift(options: Options) -> Outcome:
    from fedshift.core.optimizer import SGD
    from fedshift.core.work import Work
    from fedshift.data.assembly import federation
    from fedshift.experiments.settings import Settings
    from fedshift.experiments.trial import Trial
    from fedshift.methods.fedavg import fedavg

    clients = {f"client{i}": (x, y, x[:1], y[:1]) for i, (x, y) in enumerate(data())}
    never = options.rounds + 1
    settings = Settings(
        rounds=never, evaluate_every=never, work=Work(batch_size=BATCH, epochs=1), optimizer=SGD(lr=LR),
        engine=options.engine,
    )  # fmt: skip
    trial = Trial(fedavg(), lambda *_: network(), federation(clients, classes=10), settings, seed=0)
    seconds = timed(trial.advance, options.rounds)
    return seconds, dict(trial.model_state() or {})


def plain(options: Options) -> Outcome:
    loop = PlainLoop(network(), [ready_batches(i) for i in range(CLIENTS)], lr=LR)
    seconds = timed(loop.round, options.rounds)
    return seconds, loop.server.state_dict()


def pfl(options: Options) -> Outcome:
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByDatapoints
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam.base import NNTrainHyperParams
    from pfl.metrics import Weighted
    from pfl.model.pytorch import PyTorchModel

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            self.train()
            return F.cross_entropy(self.network(x), y)

        def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:
            self.eval()
            return {"loss": Weighted(F.cross_entropy(self.network(x), y).item() * len(y), len(y))}

    class Clock(TrainingProcessCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.marks: list[float] = []

        def on_train_begin(self, *, model: Any) -> Any:
            self.marks.append(time.perf_counter())
            return super().on_train_begin(model=model)

        def after_central_iteration(self, aggregate_metrics: Any, model: Any, *, central_iteration: int) -> Any:
            self.marks.append(time.perf_counter())
            return super().after_central_iteration(aggregate_metrics, model, central_iteration=central_iteration)

    asyncio.set_event_loop(asyncio.new_event_loop())
    sampler = get_user_sampler("minimize_reuse", list(range(CLIENTS)))
    users = FederatedDataset.from_slices(dict(enumerate(data())), sampler)
    model, clock = Model(), Clock()
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=options.rounds, evaluation_frequency=options.rounds + 1,
            train_cohort_size=CLIENTS, val_cohort_size=None,
        ),
        backend=SimulatedBackend(training_data=users, val_data=users, postprocessors=[WeightByDatapoints()]),
        model=PyTorchModel(model, torch.optim.SGD, torch.optim.SGD(model.parameters(), lr=1.0)),
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=LR, local_batch_size=BATCH
        ),
        callbacks=[clock],
        send_metrics_to_platform=False,
    )  # fmt: skip
    return between(clock.marks), model.network.state_dict()


def _without_operators() -> None:
    """Let fedlab be imported where torchvision is not made for this build of torch, and say so on stderr.

    fedlab's trainers import its sets of images, which import torchvision; nothing that is measured uses it.
    """
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError) as error:
        print(f"NOTE: torchvision does not load ({error}); an empty module stands in for it", file=sys.stderr)
        empty = ModuleType("torchvision")
        empty.__dict__.update(transforms=ModuleType("transforms"), datasets=ModuleType("datasets"))
        sys.modules["torchvision"] = empty


def fedlab(options: Options) -> Outcome:
    _without_operators()
    from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
    from fedlab.contrib.algorithm.basic_server import SyncServerHandler
    from fedlab.contrib.dataset.basic_dataset import FedDataset
    from fedlab.core.standalone import StandalonePipeline

    class Clients(FedDataset):  # type: ignore[misc]
        def get_dataloader(self, id: int, batch_size: int, type: str = "train") -> Any:
            return loader(id, options.ready, shuffle=False)

    class Timed(StandalonePipeline):  # type: ignore[misc]
        def evaluate(self) -> None:
            marks.append(time.perf_counter())

    trainer = SGDSerialClientTrainer(network(), CLIENTS)
    trainer.setup_dataset(Clients())
    trainer.setup_optim(epochs=1, batch_size=BATCH, lr=LR)
    handler = SyncServerHandler(network(), options.rounds, 1.0)
    marks = [time.perf_counter()]
    Timed(handler, trainer).main()
    return between(marks), handler.model.state_dict()


def fedjax(options: Options) -> Outcome:
    import jax

    if not hasattr(jax, "tree_map"):
        print("NOTE: jax lacks tree_map, which fedjax calls; jax.tree.map stands in for it", file=sys.stderr)
        jax.tree_map = jax.tree.map
    from fedjax import ClientDataset, ShuffleRepeatBatchHParams, optimizers
    from fedjax.algorithms.fed_avg import federated_averaging

    start = network().state_dict()
    names = list(start)
    layers = list(zip(names[::2], names[1::2], strict=True))

    def loss(params: Any, batch: Any, _: Any) -> Any:
        x = batch["x"]
        for weight, bias in layers:
            x = x @ params[weight].T + params[bias]
            x = x if (weight, bias) == layers[-1] else jax.nn.relu(x)
        return -jax.numpy.take_along_axis(jax.nn.log_softmax(x), batch["y"][:, None], 1).mean()

    batches = ShuffleRepeatBatchHParams(batch_size=BATCH, num_epochs=1)
    method = federated_averaging(jax.grad(loss), optimizers.sgd(LR), optimizers.sgd(1.0), batches)
    keys = jax.random.split(jax.random.PRNGKey(0), CLIENTS)
    clients = [
        (f"{i}".encode(), ClientDataset({"x": x.numpy(), "y": y.numpy()}), keys[i]) for i, (x, y) in enumerate(data())
    ]
    state = method.init({name: jax.numpy.asarray(tensor.numpy()) for name, tensor in start.items()})

    def take() -> None:
        nonlocal state
        state, _ = method.apply(state, clients)
        jax.block_until_ready(state.params)

    seconds = timed(take, options.rounds)
    return seconds, {name: torch.tensor(state.params[name].tolist()) for name in names}


def flwr_train(message: Any, context: Any, ready: bool) -> Any:
    """A client's local work; actors of Ray import it, so that they make the data once."""
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

    torch.set_num_threads(1)
    model = network()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    model.train()
    for x, y in loader(int(context.node_config["partition-id"]), ready, shuffle=True):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": SAMPLES})}
    return Message(content=RecordDict(content), reply_to=message)


def flwr(options: Options) -> Outcome:
    from flwr.app import ArrayRecord
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    client, server, ready = ClientApp(), ServerApp(), options.ready
    marks: list[float] = []
    final: dict[str, Tensor] = {}

    @client.train()
    def train(message: Any, context: Any) -> Any:
        return flwr_train(message, context, ready)

    @server.main()
    def main(grid: Any, _: Any) -> None:
        def mark(*_: Any) -> None:
            marks.append(time.perf_counter())

        strategy = FedAvg(
            fraction_train=1.0, fraction_evaluate=0.0, min_train_nodes=CLIENTS, min_available_nodes=CLIENTS
        )
        result = strategy.start(
            grid=grid, initial_arrays=ArrayRecord(network().state_dict()), num_rounds=options.rounds, evaluate_fn=mark
        )
        final.update(result.arrays.to_torch_state_dict())

    run_simulation(
        server_app=server,
        client_app=client,
        num_supernodes=CLIENTS,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": options.threads},
        },
    )
    return between(marks), final


@torch.no_grad()
def final_loss(state: dict[str, Tensor]) -> float:
    """Mean loss of the model of ``state`` on all clients' samples."""
    model = network()
    model.load_state_dict(state)
    return sum(F.cross_entropy(model(x), y).item() for x, y in data()) / CLIENTS
