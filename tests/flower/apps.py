"""Apps of Flower's, usual and hostile, and rounds of the strategy over them, for tests."""

import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

import fedpriv
from fedpriv.experiment.grouping import ClippingPolicy
from fedpriv.experiment.mechanism import Mechanism, Poisson
from fedpriv.flower import PrivateStrategy, clipping_mod
from fedpriv.flower import messages as flower_messages
from tests.flower.local_grid import App, LocalGrid, in_turns

SECRET = "a user's secret"
FIRST_ID = 2**64 - 1001  # as Flower gives them: most are held by no float64
NODES = 8
NORM = 0.5
SHAPES = {"conv.weight": (3, 4), "conv.bias": (3,), "head.weight": (2, 3), "scale": ()}
DELTA = 1e-5
FLAT = fedpriv.Flat(NORM)
START = {name: np.full(shape, 0.25, np.float32) for name, shape in SHAPES.items()}


def noiseless(clipping: ClippingPolicy = FLAT, q: float = 1.0) -> Mechanism:
    return Mechanism(
        Poisson(q), clipping, noise_multiplier=0.0, delta=DELTA, unsafe_no_privacy=True
    )


def private(z: float = 1.0, budget: float = 50.0, q: float = 0.5) -> Mechanism:
    made = Mechanism.poisson(q, fedpriv.Flat(NORM))
    return made.with_noise(z, epsilon=budget, delta=DELTA)


def update_of(user: int) -> dict[str, np.ndarray]:
    """What training moves a user's parameters by; some within the norm, some far beyond."""
    rng = np.random.default_rng(user)
    size = 10.0 ** rng.uniform(-3.0, 2.0)
    return {name: size * rng.normal(size=shape) for name, shape in SHAPES.items()}


def usual_app(users_of: Callable[[Message, Context], int], mods: list | None = None) -> App:
    """As in Flower's guides: load the parameters, train, return parameters and figures."""
    app = ClientApp(mods=mods)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        arrays = message.content["arrays"]
        update = update_of(users_of(message, context))
        trained = {
            name: Array(np.asarray(array.numpy() + update.get(name, 0), array.dtype))
            for name, array in arrays.items()
        }
        assert message.content["config"]["server-round"] >= 1
        figures = MetricRecord({"num-examples": 3, "train_loss": 0.5})
        content = RecordDict({"arrays": ArrayRecord(trained), "metrics": figures})
        return Message(content, reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return Message(RecordDict({"metrics": MetricRecord({"loss": 0.5})}), reply_to=message)

    return in_turns(app)


def by_partition(_message: Message, context: Context) -> int:
    return int(context.node_config["partition-id"])


def by_config(message: Message, context: Context) -> int:
    """Users are numbered node by node, ten at each."""
    return 10 * by_partition(message, context) + int(message.content["config"]["user"])


USUAL = usual_app(by_partition)
WITH_MOD = usual_app(by_partition, [clipping_mod])
OF_MANY = usual_app(by_config, [clipping_mod])


@contextmanager
def grid_of(apps: Mapping[int, App]) -> Iterator[LocalGrid]:
    """A grid of nodes, by number."""
    grid = LocalGrid({FIRST_ID + k: (app, {"partition-id": k}) for k, app in apps.items()})
    try:
        yield grid
    finally:
        grid.close()


def record_of(arrays: Mapping[str, np.ndarray]) -> ArrayRecord:
    return ArrayRecord({name: Array(np.asarray(array)) for name, array in arrays.items()})


def ids(nodes: int = NODES, users: int = 1) -> dict[int, int]:
    return {FIRST_ID + k: users for k in range(nodes)}


def run(
    folder: Path,
    grid: Grid,
    mechanism: Mechanism,
    nodes: Mapping[int, int] | None = None,
    rounds: int = 1,
    start: Mapping[str, np.ndarray] = START,
    **more: object,
) -> Result:
    folder.mkdir(exist_ok=True)
    strategy = PrivateStrategy(mechanism, nodes or ids(), "crowd", folder / "l.sqlite")
    return strategy.start(grid, record_of(start), rounds, timeout=120.0, **more)


def arrays_of(result: Result) -> dict[str, np.ndarray]:
    return {name: array.numpy() for name, array in result.arrays.items()}


def slow_clip(
    update: Mapping[str, np.ndarray], parts: list[list[str]], norm: float, scales: dict[str, float]
) -> dict[str, np.ndarray]:
    clipped = {}
    for part in parts:
        length = np.sqrt(sum(np.sum((update[n] / scales[n]) ** 2) for n in part))
        for name in part:
            clipped[name] = update[name] * min(1.0, norm / length)
    return clipped


ONES = dict.fromkeys(SHAPES, 1.0)
SCALES = {"conv.weight": 0.5, "conv.bias": 2.0, "head.weight": 1.0, "scale": 3.0}
LAYERS = [["conv.weight", "conv.bias"], ["head.weight"], ["scale"]]
CLIPPINGS = {
    "flat": (fedpriv.Flat(NORM), [list(SHAPES)], NORM, ONES),
    "per-layer": (fedpriv.PerLayer(NORM), LAYERS, NORM / np.sqrt(3), ONES),
    "joint": (fedpriv.Joint(NORM, SCALES), [list(SHAPES)], NORM, SCALES),
}


def content(change: Callable[[RecordDict], None]) -> App:
    """The usual app, with a change to what it sends."""

    def answer(message: Message, context: Context) -> Message:
        reply = USUAL(message, context)
        change(reply.content)
        return reply

    return answer


def weights(change: Callable[[np.ndarray], np.ndarray], name: str = "conv.weight") -> App:
    def changed(records: RecordDict) -> None:
        arrays = records["arrays"]
        arrays[name] = Array(change(arrays[name].numpy()))

    return content(changed)


def saved(data: bytes) -> App:
    def changed(records: RecordDict) -> None:
        records["arrays"]["conv.weight"] = Array("float32", (3, 4), "numpy.ndarray", data)

    return content(changed)


def pickled() -> bytes:
    file = io.BytesIO()
    np.save(file, np.array([{"a": 1}], object), allow_pickle=True)
    return file.getvalue()


def archive() -> bytes:
    file = io.BytesIO()
    np.savez_compressed(file, np.zeros(10**6))
    return file.getvalue()


def much_declared() -> bytes:
    file = io.BytesIO()
    np.save(file, np.zeros((3, 4), np.float32))
    return file.getvalue().replace(b"(3, 4), }      ", b"(3, 4000000), }")


def raising(_message: Message, _context: Context) -> Message:
    raise RuntimeError(SECRET)


def in_error(message: Message, _context: Context) -> Message:
    return Message(Error(code=2, reason=SECRET), reply_to=message)


def from_elsewhere(message: Message, context: Context) -> Message:
    reply = USUAL(message, context)
    vars(reply.metadata)["_src_node_id"] = FIRST_ID + 1
    return reply


def empty(message: Message, context: Context) -> Message:
    reply = USUAL(message, context)
    vars(reply)["_content"] = None
    return reply


def summing(total: Callable[[int], np.ndarray], version: str = fedpriv.__version__) -> App:
    """Sends a sum as the mod does, of any integers."""

    def answer(message: Message, _context: Context) -> Message:
        size = sum(int(np.prod(shape)) for shape in SHAPES.values()) + 1  # one counts its users
        data = total(size).tobytes()
        array = Array(dtype="uint8", shape=(len(data),), stype="bytes", data=data)
        sent = flower_messages.content_of()
        sent["fedpriv"]["version"], sent["fedpriv.array"] = version, ArrayRecord({"fedpriv": array})
        return Message(sent, reply_to=message)

    return answer


def moved(records: RecordDict) -> None:
    records["more"] = records["arrays"]


HOSTILE: dict[str, App] = {
    "raises": raising,
    "an error": in_error,
    "nothing": empty,
    "from another node": from_elsewhere,
    "not a number": weights(lambda w: np.where(np.arange(4) == 1, np.nan, w)),
    "infinite": weights(lambda w: w - np.inf),
    "a norm that overflows": weights(lambda w: w * 0.0 + 1e300),
    "integers": weights(lambda w: w.astype(np.int64)),
    "complex": weights(lambda w: w.astype(complex)),
    "another shape": weights(np.transpose),
    "a shape that spreads": weights(lambda w: w[:1]),
    "a number": weights(lambda w: np.array(w[0, 0])),
    "a type that says something": weights(lambda w: w.astype([(SECRET, np.float32)])),
    "an array more": content(
        lambda r: r["arrays"].update({"more": Array(np.zeros(3, np.float32))})
    ),
    "an array less": content(lambda r: r["arrays"].__delitem__("scale")),
    "no arrays": content(lambda r: r.__delitem__("arrays")),
    "arrays twice": content(moved),
    "a pickle": saved(pickled()),
    "an archive": saved(archive()),
    "more declared than there is": saved(much_declared()),
    "no bytes": saved(b""),
    "a long sum": summing(lambda size: np.full(size, 2**40)),
    "a sum of another length": summing(lambda size: np.zeros(size + 1, np.int64)),
    "a sum of floats": summing(lambda size: np.zeros(size, np.float32)),
    "another version": summing(lambda size: np.zeros(size, np.int64), "0.0.0"),
    "a record in place of the sum's": content(
        lambda r: r.update({"fedpriv.array": ConfigRecord()})
    ),
}
