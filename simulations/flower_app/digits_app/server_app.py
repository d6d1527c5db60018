"""Flower's usual ServerApp, with a private strategy in place of FedAvg."""

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from fedpriv import Flat, Mechanism
from fedpriv.flower import PrivateStrategy, connected

from .task import Net, accuracy

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train, and print the model's accuracy and its cost."""
    config = context.run_config
    rounds, ledger = int(config["rounds"]), str(config["ledger"])
    nodes = connected(grid, int(config["nodes"]))
    mechanism = Mechanism.poisson(q=0.5, clipping=Flat(1.0))
    mechanism = mechanism.calibrate(epsilon=float(config["epsilon"]), delta=1e-3, rounds=rounds)
    strategy = PrivateStrategy(mechanism, nodes, population="digits", ledger=ledger)
    initial = ArrayRecord(Net().state_dict())
    result = strategy.start(grid, initial, num_rounds=rounds, evaluate_fn=evaluate)
    last = max(result.train_metrics_clientapp)  # rounds end early if the budget does
    spent = result.train_metrics_clientapp[last]["privacy/epsilon"]
    reached = result.evaluate_metrics_serverapp[last]["accuracy"]
    print(f"after {last} rounds, accuracy {reached} at ε = {spent}")


def evaluate(_round: int, arrays: ArrayRecord) -> MetricRecord:
    """Return the accuracy on rows that no node has."""
    model = Net()
    model.load_state_dict(arrays.to_torch_state_dict())
    return MetricRecord({"accuracy": accuracy(model)})
