"""The client: what the line marked `FedBN` says stays on its disk, and the rest is as for FedAvg."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

import fedshift.flower  # FedBN: 1
from flower_fedbn.task import Net, load_data, test, train

app = ClientApp(mods=[fedshift.flower.keep_local(Net(), fedshift.fedbn())])  # FedBN: 2


def came(message: Message) -> Net:
    """The model that came."""
    model = Net()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    return model


@app.train()
def train_one_round(message: Message, context: Context) -> Message:
    """Train the model that came on this client's data."""
    model, number = came(message), message.content["config"]["server-round"]
    x, y = load_data(context.node_config["partition-id"], "train")
    loss = train(model, x, y, message.content["config"]["lr"], seed=number)
    metrics = MetricRecord({"num-examples": len(y), "loss": loss})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Test the model that came, which with FedBN has this client's normalization."""
    x, y = load_data(context.node_config["partition-id"], "test")
    metrics = MetricRecord({"num-examples": len(y), "accuracy": test(came(message), x, y)})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)
