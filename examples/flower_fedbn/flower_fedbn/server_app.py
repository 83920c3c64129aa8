"""The server: the strategy in the lines marked `FedBN` stands where FedAvg stood."""

import torch
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

import fedshift.flower  # FedBN: 3
from flower_fedbn.task import Net

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train for the rounds that the run's configuration asks for."""
    torch.manual_seed(0)
    model = Net()
    method = fedshift.fedbn()  # FedBN: 4
    strategy = fedshift.flower.MethodStrategy(method, model, min_clients=5)  # FedBN: 5, in place of FedAvg(...)
    strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=context.run_config["rounds"])
