"""Flower's usual ClientApp, without any code for privacy."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from .task import Net, load, train

app = ClientApp()


@app.train()
def train_here(message: Message, context: Context) -> Message:
    """Train the model of a message on the rows of this node, and send it back."""
    model = Net()
    model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    part, parts = (int(context.node_config[name]) for name in ("partition-id", "num-partitions"))
    rows = load(part, parts)
    loss = train(model, rows, float(context.run_config["learning-rate"]))
    content = RecordDict({"arrays": ArrayRecord(model.state_dict())})
    content["metrics"] = MetricRecord({"train_loss": loss, "num-examples": len(rows[1])})
    return Message(content, reply_to=message)
