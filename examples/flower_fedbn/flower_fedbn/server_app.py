"""The server: the lines marked `FedBN` are those that differ from an app of FedAvg."""

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp

import fedshift.flower  # FedBN: 3
from flower_fedbn.task import Net

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train for the rounds that the run's configuration asks for, and save the shared entries."""
    fraction_evaluate = context.run_config["fraction-evaluate"]
    torch.manual_seed(0)
    arrays = ArrayRecord(Net().state_dict())
    strategy = fedshift.flower.MethodStrategy(fedshift.fedbn(), Net(), fraction_evaluate=fraction_evaluate)  # FedBN: 4
    result = strategy.start(
        grid=grid,
        initial_arrays=arrays,
        train_config=ConfigRecord({"lr": context.run_config["lr"]}),
        num_rounds=context.run_config["rounds"],
    )  # FedBN: 5, without evaluate_fn
    torch.save(result.arrays.to_torch_state_dict(), "final_model.pt")
