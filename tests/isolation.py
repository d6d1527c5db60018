"""Populations chosen by an enemy, models and plans, and the one property of all transports.

What a user contributes is a function of that user's own data, the request and the user's own key,
to the last bit: sums over cohorts are sums of what each user gives alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain

import numpy as np
import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from fedpriv.data.population import Population, UserStore
from fedpriv.engine.adapters import with_adapters
from fedpriv.engine.task import Task, cross_entropy, running_norms
from fedpriv.experiment.grouping import equal_split, scales_by_dimension
from fedpriv.experiment.models import build_model
from fedpriv.measures.metrics import metric
from fedpriv.privacy.gaussian_mechanism import Averaging, Metric
from fedpriv.privacy.layout import Layout, VectorGroup, flat, joint, layers, per_layer
from fedpriv.privacy.noise import SeededEntropy
from fedpriv.privacy.round import add_up
from fedpriv.privacy.sampling import PoissonSampling
from fedpriv.training.local import SGD, AdamW, FedRecon, Scaffold
from fedpriv.training.plan import AdaptiveClipping, RunningStatistics, TrainingPlan
from fedpriv.training.request import LocalTraining, RoundRequest, Transport
from fedpriv.training.rounds import initial_state
from tests.opening import open_round

CLASSES, SIDE, WORDS, LENGTH = 4, 6, 9, 5


class Own(nn.Module):
    """Weights of its own, which the engine knows nothing of."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(SIDE * SIDE, CLASSES) / 6)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(x.flatten(1) @ self.w) * self.scale


def _mlp() -> nn.Module:
    return build_model("mlp", {"inputs": 36, "hidden": 8, "classes": CLASSES}, 0)


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1),
        nn.GroupNorm(1, 3),
        nn.GELU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(27, CLASSES),
    )


def _normalised() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, CLASSES)
    )


def _dropping() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(36, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, CLASSES)
    )


class Spelled(nn.Module):
    """What is written in other ways than as layers: a decoder that reads the encoder's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.act = nn.Linear(36, 8), nn.PReLU()
        self.norm, self.head = nn.RMSNorm(8), nn.Linear(36, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.act(self.encoder(x.view(-1, 36))))
        return self.head(torch.relu(functional.linear(h, self.encoder.weight.t())))


class TwoInputs(nn.Module):
    """Two towers."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.more, self.head = nn.Linear(36, 5), nn.Linear(2, 5), nn.Linear(5, CLASSES)

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.image(x.flatten(1)) * self.more(z)))


class Experts(nn.Module):
    """Each row goes to one of three experts, who see only their own rows."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(36, 3)
        self.experts = nn.ModuleList(nn.Linear(36, CLASSES) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)
        shares = self.gate(x).softmax(1)
        chosen, out = shares.argmax(1), x.new_zeros(len(x), CLASSES)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            out = out.index_add(0, rows, expert(x[rows]) * shares[rows, number, None])
        return out


class Packed(nn.Module):
    """A GRU over words up to the first 0, packed."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 4, padding_idx=0)
        self.gru, self.head = nn.GRU(4, 5, batch_first=True), nn.Linear(5, WORDS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lengths = (x != 0).sum(1).clamp(min=1)
        packed = nn.utils.rnn.pack_padded_sequence(
            self.words(x), lengths, batch_first=True, enforce_sorted=False
        )
        return self.head(self.gru(packed)[1][-1])[:, :, None].expand(-1, -1, LENGTH)


class Lstm(nn.Module):
    """Predicts words; tied, by the weights with which it reads them."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.words, self.lstm = nn.Embedding(WORDS, 5), nn.LSTM(5, 5, batch_first=True)
        self.head = nn.Linear(5, WORDS)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.words(x))[0]).transpose(1, 2)


def contrastive(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A loss that compares rows with each other."""
    z = functional.normalize(outputs, dim=1, eps=1e-3)
    scores = (z @ z.T).masked_fill(torch.eye(len(z), dtype=torch.bool), -1e9)
    same = (targets[:, None] == targets).float()
    return -(scores.log_softmax(1) * same).sum(1) / same.sum(1)


class Whitened(nn.Module):
    """Normalises by the statistics of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(36, 6), nn.Linear(6, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x.flatten(1))
        return self.head((h - h.mean(0)) / (h.var(0, unbiased=False) + 0.1).sqrt())


def _transformer() -> nn.Module:
    options = {"alphabet": WORDS, "length": LENGTH, "width": 8, "blocks": 1}
    return build_model("simulations.transformer:CharacterTransformer", options, 0)


def _adapted() -> nn.Module:
    layers = ("characters", "blocks.*")
    return with_adapters(_transformer(), 4, 8, layers)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: build_model("softmax", {"inputs": 36, "classes": CLASSES}, 0),
    "mlp": _mlp,
    "cnn": _cnn,
    "transformer": _transformer,
    "adapters": _adapted,
    "frozen-trunk": _cnn,
    "own": Own,
    "dropout": _dropping,
    "batch-norm": _normalised,
    "personal-head": _mlp,
    "personal-scale": Own,
    "spelled": Spelled,
    "two-inputs": TwoInputs,
    "experts": Experts,
    "contrastive": _mlp,
    "own-statistics": Whitened,
    "packed": Packed,
    "lstm": lambda: Lstm(tied=False),
    "lstm-tied": lambda: Lstm(tied=True),
}
PERSONAL = {"personal-head": ("3.*",), "personal-scale": ("scale",)}
FROZEN = {"frozen-trunk": ("0.*",)}
READERS = {"transformer", "adapters", "packed", "lstm", "lstm-tied"}
"""Models of words."""
ALONE = {"experts", "contrastive", "own-statistics", "packed", "lstm", "lstm-tied"}
"""Models whose users cannot go side by side."""


@cache
def task_of(kind: str) -> Task:
    """The task of a kind of model; the same one each time."""
    torch.manual_seed(0)
    personal, frozen = PERSONAL.get(kind, ()), FROZEN.get(kind, ())
    loss = contrastive if kind == "contrastive" else cross_entropy
    inputs = ("x", "z") if kind == "two-inputs" else "x"
    return Task(MODELS[kind](), loss, inputs=inputs, personal=personal, frozen=frozen)


USERS = (
    "normal",
    "nan",
    "inf",
    "huge",
    "subnormal",
    "zeros",
    "illegal",
    "ignored",
    "cancelling",
    "every label",
    "large",
)


@dataclass(frozen=True)
class User:
    """One user, in a few words."""

    kind: str  # one of `USERS`
    size: int  # number of examples
    seed: int  # of its numbers

    def data(self, words: bool) -> tuple[np.ndarray, np.ndarray]:
        """Its inputs and targets."""
        rng, size = np.random.default_rng(self.seed), self.size
        if words:
            x, y = rng.integers(0, WORDS, (2, size, LENGTH))
            if self.kind in ("illegal", "nan"):
                (x if self.kind == "nan" else y)[size // 2 :, 0] = WORDS + 5
            if self.kind == "ignored":
                y[:, : self.seed % (LENGTH + 1)] = -100
            return x, y
        x = rng.standard_normal((size, 1, SIDE, SIDE)).astype(np.float32)
        y = rng.integers(0, CLASSES, size)
        match self.kind:
            case "nan" | "inf" | "huge":
                x[size // 2 :, 0, 0, 0] = {"nan": np.nan, "inf": -np.inf, "huge": 1e38}[self.kind]
            case "subnormal":
                x *= np.float32(1e-40)
            case "zeros":
                x[:] = 0.0
            case "illegal":
                y[size // 2 :] = CLASSES + 3
            case "ignored":  # some or all of its targets
                y[self.seed % (size + 1) :] = -100
            case "cancelling":  # one image under two labels in turn
                x[:] = x[:1]
                y[:] = np.arange(size) % 2
            case "every label":
                x[:] = x[:1]
                x[:1] *= np.float32(0.99)
                y[:] = np.arange(size) % CLASSES
            case "large":
                x *= np.float32(1e3)
        return x, y


def crowd(users: Sequence[tuple[str, int, int]], words: bool) -> Population:
    """Users as a population that a worker loads by name."""
    store = store_of([User(*user) for user in users], words)
    return Population("people", store, {name: rows[:1] for name, rows in store.fields.items()})


def model(kind: str) -> nn.Module:
    """A kind of model as nodes build it by name."""
    return MODELS[kind]()


def store_of(users: Sequence[User], words: bool, labels: type = np.int64) -> UserStore:
    """The data of some users, with labels of this type."""
    data = [user.data(words) for user in users]
    fields = {name: np.concatenate([d[i] for d in data]) for i, name in enumerate(("x", "y"))}
    fields["y"] = fields["y"].astype(labels)
    numbers = fields["x"].reshape(len(fields["x"]), LENGTH if words else SIDE * SIDE)
    fields["z"] = numbers[:, :2].astype(np.float32)
    return UserStore(fields, np.cumsum([0, *(user.size for user in users)]))


def people(most: int, largest: int) -> st.SearchStrategy[list[User]]:
    """Lists of users: many of a kind and size, many of a kind with Pareto sizes, and others."""
    sizes = st.sampled_from([0, 1, 2, 3, 5, 8, 9, 10, 11, 16, 17, 33, 64, 100, 300])
    one = st.builds(
        User, st.sampled_from(USERS), sizes.map(lambda n: min(n, largest)), st.integers(0, 99)
    )

    def crowd_of(user: User, count: int, pareto: bool) -> list[User]:
        spread = 1.0 + np.random.default_rng(user.seed).pareto(1.0, count) * pareto
        grown = np.minimum(user.size * spread, largest).astype(int).tolist()
        return [replace(user, seed=user.seed + i, size=n) for i, n in enumerate(grown)]

    many = st.builds(crowd_of, one, st.integers(1, max(1, most // 2)), st.booleans())
    return st.lists(many, min_size=1, max_size=6).map(lambda parts: [*chain(*parts)][:most])


@dataclass(frozen=True)
class Plan:
    """What a round asks, in a few words."""

    model: str  # one of `MODELS`
    clipping: str  # "flat", "per-layer", "joint" or "groups"
    averaging: str  # "equal", "weights" or "floor"
    local: LocalTraining  # how users train
    adaptive: bool  # whether the clipped are counted
    measured: bool  # whether there are metrics
    norm: float  # S


LOCALS = (
    SGD(0.1, batch_size=4, epochs=1),
    SGD(1.0, epochs=1),
    SGD(0.3, epochs=2, max_examples=20),
    SGD(0.1, batch_size=3, steps=4, momentum=0.9),
    SGD(0.1, batch_size=8, epochs=2, proximal=0.5),
    SGD(3.0, batch_size=1, epochs=1, max_examples=9),
    AdamW(0.02, batch_size=4, epochs=2),
    Scaffold(0.3, epochs=3, control_norm=0.4),
    FedRecon(0.3, batch_size=4, steps=5, momentum=0.5, personal_steps=3, personal_rate=0.2),
)

plans = st.builds(
    Plan,
    st.sampled_from(sorted(MODELS)),
    st.sampled_from(["flat", "per-layer", "joint", "groups"]),
    st.sampled_from(["equal", "weights", "floor"]),
    st.sampled_from(LOCALS),
    st.booleans(),
    st.booleans(),
    st.sampled_from([1e-3, 0.3, 100.0]),
)


def training_plan(plan: Plan, population: int, rounds: int = 1, z: float = 1.0) -> TrainingPlan:
    """The plan for a population, of whom all are in every cohort."""
    task = task_of(plan.model)
    layout = Layout.of(task.parameters())
    groups = _groups(plan, layout)
    metrics, statistics = _metrics(plan, task, groups)
    return TrainingPlan(
        run="run",
        population="people",
        rounds=rounds,
        layout=layout,
        groups=groups,
        noise_shares=(1.0 / len(groups),) * len(groups),
        noise_multiplier=z,
        sampling=PoissonSampling(population, 1.0),
        local=plan.local,
        metrics=metrics,
        metrics_share=0.2 if metrics else 0.0,
        adaptive=AdaptiveClipping() if plan.adaptive else None,
        averaging={
            "equal": Averaging(),
            "weights": Averaging(cap=7, total_weight=float(population)),
            "floor": Averaging(cap=7, total_weight=float(population), floor=0.5),
        }[plan.averaging],
        statistics=statistics,
    )


def _groups(plan: Plan, layout: Layout) -> tuple[VectorGroup, ...]:
    norm = plan.norm
    match plan.clipping:
        case "flat":
            return flat(layout, norm)
        case "per-layer":
            return per_layer(layout, layers(layout), equal_split(layers(layout), norm))
        case "joint":
            return joint(layout, norm, scales_by_dimension(layout))
        case _:  # two groups, one of them joint, whose tensors do not lie side by side
            one, other = layout.names[::2], layout.names[1::2]
            scales = tuple(2.0**i for i in range(len(one)))
            first = VectorGroup("one", one, norm, scales)
            if not other:
                return (first,)
            return first, VectorGroup("other", other, norm / 3, (1.0,) * len(other))


def _metrics(
    plan: Plan, task: Task, groups: tuple[VectorGroup, ...]
) -> tuple[tuple[Metric, ...], RunningStatistics | None]:
    if not plan.measured:
        return (), None
    classes = WORDS if plan.model in READERS else CLASSES
    metrics = (
        metric("accuracy"),
        metric("loss", bound=3.0),
        metric("examples", cap=20),
        metric("label-counts", classes=classes, bound=10.0),
        metric(f"update-norms:{groups[0].name}", thresholds=[1e-2, 0.1, 1.0]),
    )
    norms = running_norms(task.model)
    if not norms:
        return metrics, None
    channels = tuple(layer.channels for layer in norms.values())
    statistics = RunningStatistics(tuple(norms), channels, tuple(n.eps for n in norms.values()))
    return (*metrics, metric("batch-norm", channels=sum(channels), bound=2.0)), statistics


def request_of(plan: Plan, population: int) -> RoundRequest:
    """The request of the first round, to all of a population."""
    task, asked = task_of(plan.model), training_plan(plan, population)
    state = initial_state(asked, task.parameters(), task.statistics())
    if state.control:  # as in a later round
        rng = np.random.default_rng(4)
        control = {
            n: rng.standard_normal(c.shape).astype(c.dtype) for n, c in state.control.items()
        }
        state = replace(state, control=control)
    return open_round(asked, state, 0, SeededEntropy(3))


def total(transport: Transport, request: RoundRequest, users: Sequence[int]) -> np.ndarray:
    """What some users add up to: int64[D], then their weight."""
    asked = replace(request, users=np.array(sorted(users), np.int64))
    found = add_up(transport.collect(asked), request.clipping, len(users))
    return np.append(found.total, found.weight)


def assert_additive(transport: Transport, request: RoundRequest) -> None:
    """Users of a request give in any company, to the last bit, what each gives alone."""
    users = request.users.tolist()
    alone = {user: total(transport, request, [user]) for user in users}
    for contribution in alone.values():
        assert_bounded(request, contribution)
    for cohort in (users, users[1:], users[:-1], users[::2]):
        expected = sum(alone[user] for user in cohort)
        np.testing.assert_array_equal(total(transport, request, cohort), expected)


def assert_bounded(request: RoundRequest, contribution: np.ndarray) -> None:
    """One user's integers are within the bound of each group, exactly."""
    clipping, weight = request.clipping, int(contribution[-1])
    for group in clipping.groups:
        spans = clipping.spans[group.name]
        square = sum(x * x for span in spans for x in contribution[span].tolist())
        assert square <= group.squared_bound, group.name
        if group.name in clipping.weighted:
            assert square * clipping.weight_cap**2 <= weight**2 * group.squared_bound, group.name
