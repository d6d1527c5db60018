"""The works of a benchmark, each with users, a model and local settings.

Data that are not available are replaced by random ones of the same shapes: the speed of training
does not depend on their content.
"""

import io
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from fedpriv.data.builtin import synthetic_population
from fedpriv.engine.adapters import with_adapters
from fedpriv.experiment.models import cnn, mlp, softmax_regression
from fedpriv.training.local import SGD
from simulations.benchmarks.models import (
    VARIANTS,
    WORDS,
    TwoTowers,
    cifar_cnn,
    language_lstm,
    language_transformer,
    ten_layers,
)
from simulations.benchmarks.roles import data_folder, roles
from simulations.transformer import CharacterTransformer

Fields = Mapping[str, Tensor]
"""Inputs [rows, …] of all users by the names of the model's arguments, then targets."""

_SEED = 0
_FEWEST_ROWS, _MOST_ROWS, _PARETO = 5, 500, 1.1


@dataclass(frozen=True)
class Work:
    """One row of the table."""

    title: str  # a description in a few words
    build: Callable[[], nn.Module]  # makes the model, with the same initial parameters each time
    fields: Fields
    offsets: NDArray[np.int64]  # user u owns rows offsets[u]:offsets[u + 1]
    local: SGD  # how a user trains
    clipping_norm: float  # S of flat clipping
    # Number of users on whom sums are compared, and of Flower's nodes. They are the last users and
    # train in no turn. All rows of such a user are alike, so that their order does not matter.
    copies: int = 0
    # The largest relative difference of sums; if a model draws masks, only sizes are compared.
    tolerance: float = 1e-4
    # How many of the first users a contestant trains in a turn, by contestant; by default all
    turns: Mapping[str, int] = field(default_factory=dict)

    @property
    def users(self) -> int:
        """The number of users, without copies."""
        return len(self.offsets) - 1 - self.copies

    @property
    def checked(self) -> range:
        """Users on whom sums are compared."""
        return range(self.users, self.users + self.copies)

    def examples_of(self, user: int) -> tuple[Tensor, ...]:
        """Return inputs and targets of a user, as views."""
        rows = slice(int(self.offsets[user]), int(self.offsets[user + 1]))
        return tuple(tensor[rows] for tensor in self.fields.values())

    def users_in_a_turn(self, contestant: str) -> int:
        """Return the number of users that a contestant trains in a turn."""
        return self.copies if contestant == "flower" else self.turns.get(contestant, self.users)

    def with_copies(self, count: int) -> "Work":
        """Return the work with copies of its first `count` users; a copy repeats its first row."""
        sizes = np.diff(self.offsets)[:count]
        rows = torch.from_numpy(np.repeat(self.offsets[:count], sizes))
        fields = {name: torch.cat([tensor, tensor[rows]]) for name, tensor in self.fields.items()}
        offsets = np.concatenate([self.offsets, self.offsets[-1] + np.cumsum(sizes)])
        return replace(self, fields=fields, offsets=offsets, copies=count)

    def flops_of(self, users: int) -> float:
        """Return the operations of matrix products and convolutions to train the first users."""
        model, count = self.build(), FlopCounterMode(display=False)
        with count:
            torch.autograd.backward(loss_of(model, [t[:1] for t in self.fields.values()]))
        examples = int(self.offsets[users]) * (self.local.epochs or 1)
        return float(examples * count.get_total_flops())


def loss_of(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    """Return the mean loss of a batch: inputs, then targets."""
    *inputs, targets = batch
    return functional.cross_entropy(model(*inputs), targets)


def sgd(model: nn.Module, user: Sequence[Tensor], local: SGD) -> None:
    """Train a model on the examples of a user, in a new order in each epoch."""
    optimizer = torch.optim.SGD(trained(model), lr=local.rate)
    rows = len(user[0])
    for _ in range(local.epochs or 1):
        order = torch.randperm(rows, device=user[0].device)
        for batch in torch.split(order, local.batch_size or rows):
            optimizer.zero_grad()
            torch.autograd.backward(loss_of(model, [tensor[batch] for tensor in user]))
            optimizer.step()


def trained(model: nn.Module) -> list[Tensor]:
    """Return the parameters that are not frozen."""
    return [p for p in model.parameters() if p.requires_grad]


def clipped(update: list[Tensor], clipping_norm: float) -> list[Tensor]:
    """Return an update, scaled down if its norm is above a bound."""
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(u) for u in update]))
    factor = torch.clamp(clipping_norm / norm, max=1.0)
    return [part * factor for part in update]


def flattened(tensors: Sequence[Tensor]) -> NDArray[np.float64]:
    """Return tensors in the order of the model's parameters, as one vector [D]."""
    return torch.cat([t.detach().flatten().cpu() for t in tensors]).double().numpy()


def equal(users: int, rows: int) -> list[int]:
    """Return sizes of users who share `rows` rows as evenly as possible."""
    return [rows // users + (user < rows % users) for user in range(users)]


def pareto(users: int) -> list[int]:
    """Return realistic sizes, in random order: Pareto's distribution from 5 rows on, cut at 500."""
    tail = 1 - (np.random.default_rng(_SEED).permutation(users) + 0.5) / users
    sizes = _FEWEST_ROWS * tail ** (-1 / _PARETO)
    return [int(min(size, _MOST_ROWS)) for size in sizes.round()]


def _evenly(sizes: Sequence[int]) -> list[int]:
    return equal(len(sizes), sum(sizes))


def _normal(sizes: Sequence[int], *shape: int) -> Tensor:
    return torch.randn((sum(sizes), *shape), generator=torch.Generator().manual_seed(_SEED))


def _integers(sizes: Sequence[int], low: int, high: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(_SEED + 1)
    return torch.randint(low, high, (sum(sizes), *shape), generator=generator)


def _images(sizes: Sequence[int]) -> Fields:
    return {"x": _normal(sizes, 1, 28, 28), "y": _integers(sizes, 0, 10)}


def _texts(sizes: Sequence[int], alphabet: int, length: int) -> Fields:
    text = _integers(sizes, 1, alphabet, length + 1)  # 0 is for padding
    return {"text": text[:, :-1].contiguous(), "y": text[:, 1:].contiguous()}


def _cifar(sizes: Sequence[int]) -> Fields:
    """Return images of CIFAR-10 if they are on this machine, or else random ones."""
    file = data_folder() / "cifar10" / "cifar10.npz"
    if not file.exists():
        return {"x": _normal(sizes, 3, 32, 32), "y": _integers(sizes, 0, 10)}
    from PIL import Image  # noqa: PLC0415 - where there are images

    with np.load(file) as arrays:
        ends, labels, packed = arrays["train_offsets"], arrays["train_labels"], arrays["train_jpeg"]
    files = [packed[a:b].tobytes() for a, b in itertools.pairwise(ends[: sum(sizes) + 1])]
    images = [np.asarray(Image.open(io.BytesIO(file))) for file in files]
    x = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous().float() / 255 - 0.5
    return {"x": x, "y": torch.from_numpy(labels[: sum(sizes)].astype(np.int64))}


def _towers(sizes: Sequence[int]) -> Fields:
    pair = _normal(sizes, 2, 64)
    return {"seen": pair[:, 0].clone(), "item": pair[:, 1].clone(), "y": _integers(sizes, 0, 2)}


def _vectors(sizes: Sequence[int]) -> Fields:
    return {"x": _normal(sizes, 1000), "y": _integers(sizes, 0, 1000)}


def _variant(name: str, sizes: Sequence[int]) -> Fields:
    fields = {**_images(sizes)}
    if name == "view":
        fields["y"] = fields["y"].to(torch.uint8)
    if name == "unused":
        return {"x": fields["x"], "_other": _normal(sizes, 1), "y": fields["y"]}
    return fields


def _gpt() -> nn.Module:
    """Return a character transformer of four blocks, with adapters of rank 4 to train."""
    model = CharacterTransformer(length=64, width=128, heads=4, blocks=4)
    return with_adapters(model, 4, 8, ["blocks.*"])


def _seeded(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        return build()


def _work(
    title: str,
    model: Callable[[], nn.Module],
    data: Callable[[Sequence[int]], Fields],
    sizes: Sequence[int],
    clipping_norm: float = 0.5,
    batch_size: int = 10,
    tolerance: float = 1e-4,
    turns: Mapping[str, int] | None = None,
) -> Work:
    """Return a work: a model, data of users of these sizes, and a plan of one local epoch."""
    fewest, most = f"{min(sizes):,}", f"{max(sizes):,}"
    rows = fewest if fewest == most else f"{fewest} to {most}"
    title = f"{title}, {len(sizes):,} users × {rows}"
    local = SGD(learning_rate=0.1, batch_size=batch_size, epochs=1)
    offsets = np.cumsum([0, *sizes])
    build = partial(_seeded, model)
    work = Work(title, build, data(sizes), offsets, local, clipping_norm, turns=turns or {})
    return replace(work.with_copies(min(100, len(sizes))), tolerance=tolerance)


def _shakespeare() -> Work:
    x, y, offsets = roles(users=100)
    transformer = partial(CharacterTransformer, length=x.shape[1])
    data = lambda _: {"text": x, "y": y}  # noqa: E731
    return _work("character transformer, roles", transformer, data, np.diff(offsets).tolist())


def _softmax() -> Work:
    store = synthetic_population(users=100_000, examples_per_user=10, shape=(32,)).users
    data = lambda _: {name: torch.from_numpy(store.fields[name]) for name in ("x", "y")}  # noqa: E731
    turns = dict.fromkeys(("alone", "plain", "pfl"), 2_000)
    sizes = np.diff(store.offsets).tolist()
    return _work("softmax regression", partial(softmax_regression, 32), data, sizes, turns=turns)


def _transformer(sizes: Sequence[int]) -> Work:
    texts = partial(_texts, alphabet=96, length=32)
    return _work("character transformer", partial(CharacterTransformer, length=32), texts, sizes)


_LENGTH, _SENTENCES = 20, [20] * 8  # words of a sentence of StackOverflow, and sentences of users
_FEWER = dict.fromkeys(("alone", "plain", "pfl"), 200)  # who train one user after another
_sentences = partial(_texts, alphabet=WORDS, length=_LENGTH)
_SMALL = 1e-3  # tolerance if updates are small differences of parameters in float32
_language = partial(
    _work,
    data=_sentences,
    sizes=_SENTENCES,
    clipping_norm=0.001,
    batch_size=16,
    tolerance=_SMALL,
)
_attending = partial(language_transformer, _LENGTH)
_MASKS = 0.5  # tolerance if masks are drawn

WORKS: Mapping[str, Callable[[], Work]] = {
    "mlp": lambda: _work("MLP 784–128–10", mlp, _images, [50] * 100),
    "cnn": lambda: _work("CNN", cnn, _images, [50] * 100, 0.1),
    "shakespeare": _shakespeare,
    "softmax": _softmax,
    "dpsgd": lambda: _work("DP-SGD, CNN", cnn, _images, [1] * 600, 0.05, batch_size=1),
    "cifar": lambda: _work("pfl's CIFAR-10 CNN", cifar_cnn, _cifar, [20] * 20, tolerance=_MASKS),
    "cifar-0": lambda: _work(
        "the same without dropout", partial(cifar_cnn, 0.0), _cifar, [20] * 20
    ),
    "lstm": lambda: _language("pfl's LSTM, tied", partial(language_lstm, tied=True)),
    "lstm-untied": lambda: _language("untied", partial(language_lstm, tied=False)),
    "attention": lambda: _language(
        "pfl's transformer, tied", partial(_attending, tied=True), tolerance=_MASKS
    ),
    "attention-untied": lambda: _language(
        "untied", partial(_attending, tied=False), tolerance=_MASKS
    ),
    "towers": lambda: _work("two towers", TwoTowers, _towers, [20] * 100),
    "gpt-lora": lambda: _work(
        "small GPT, LoRA", _gpt, partial(_texts, alphabet=96, length=64), [20] * 8, 0.01
    ),
    "wide": lambda: _work(
        "10 × Linear(1000, 1000)", ten_layers, _vectors, [4] * 10, 0.005, tolerance=_SMALL
    ),
    "mlp-pareto": lambda: _work("MLP 784–128–10", mlp, _images, pareto(300)),
    "mlp-equal": lambda: _work("MLP 784–128–10", mlp, _images, _evenly(pareto(300))),
    "transformer-pareto": lambda: _transformer(pareto(100)),
    "transformer-equal": lambda: _transformer(_evenly(pareto(100))),
    **{
        f"mlp-{name}": partial(
            _work,
            f"MLP with {what}",
            model,
            partial(_variant, name),
            [50] * 100,
            tolerance=_MASKS if name == "dropout" else 1e-4,
        )
        for name, (what, model) in VARIANTS.items()
    },
    "mlp-2000": lambda: _work("MLP 784–128–10", mlp, _images, [50] * 2000, turns=_FEWER),
    "cnn-2000": lambda: _work("CNN", cnn, _images, [50] * 2000, 0.1, turns=_FEWER),
}
