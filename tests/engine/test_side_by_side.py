"""Models that seem to keep users apart, and do not: users must stay apart all the same."""

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from fedpriv.data.population import UserStore
from fedpriv.engine.local_training import Rung
from fedpriv.engine.metrics import metric
from fedpriv.engine.task import Task, cross_entropy
from fedpriv.engine.trainer import Isolation
from fedpriv.engine.transport import InProcessTransport
from fedpriv.errors import ModelError
from fedpriv.privacy.clipping import Clipping
from fedpriv.privacy.gaussian_mechanism import Metric
from fedpriv.privacy.layout import Layout
from fedpriv.privacy.round import LocalTraining, RoundRequest
from tests.engine.everyone import alone, request_under, total_of, users_of

CPU = torch.device("cpu")
USERS, EACH = 12, 4
LOCAL = LocalTraining(0.5, batch_size=2, epochs=1)
WORDS, LENGTH = 50, 16


class BrightestIsOne(nn.Module):
    """Divides images of bytes by the brightest pixel of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(LENGTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.float()
        return self.layer(x / x.max().clamp(min=1.0))


def longest(x: torch.Tensor) -> int:
    """Where the longest row ends that zeros fill up."""
    places = (x != 0).any(0).nonzero()
    return int(places.max()) + 1 if len(places) else 1


class Trimmed(nn.Module):
    """Attention over words, as far as the longest text of the batch goes."""

    def __init__(self, *, masked: bool) -> None:
        super().__init__()
        self.words, self.layer, self.masked = nn.Embedding(WORDS, 8), nn.Linear(8, 3), masked

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[:, : longest(x)]
        h, there = self.words(x), torch.ones_like(x, dtype=torch.bool)
        if self.masked:  # so that only rounding depends on others
            there = x != 0
        scores = (h @ h.transpose(1, 2)).masked_fill(~there[:, None], -1e9)
        seen = torch.softmax(scores, -1) @ h * there[..., None]
        return self.layer(seen.sum(1) / there.sum(1, keepdim=True).clamp(min=1))


class TrimmedSeries(nn.Module):
    """The mean of a series of numbers, as far as the longest of the batch goes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x[:, : longest(x)].mean(1, keepdim=True))


class Encoder(nn.Module):
    """torch's own, which has another way to compute where all masks of a batch end alike."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer = nn.Embedding(WORDS, 8, padding_idx=0), nn.Linear(8, 3)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.encoder(self.words(x), src_key_padding_mask=x == 0).mean(1))


class AlwaysDropping(nn.Module):
    """Drops units in evaluation, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(LENGTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(functional.dropout(x, 0.3))


class DrawingForSome(nn.Module):
    """Adds noise to large inputs alone."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(LENGTH, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + torch.randn_like(x) if float(x.detach().abs().max()) > 2.0 else x) @ self.w


class InMultiples(nn.Module):
    """Takes some numbers of examples only."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(LENGTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > 8 and len(x) % 16:
            raise ValueError("not a multiple of 16")
        return self.layer(x)


class Remembering(nn.Module):
    """Divides by the largest input that was seen so far, as recipes for few bits do."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.most = nn.Parameter(torch.randn(LENGTH, 3)), 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale, self.most = self.most, max(self.most, float(x.detach().abs().max()))
        return (x / scale) @ self.w


class Masking(nn.Module):
    """Masks what is beyond a length, by as many numbers as the longest says."""

    largest = 0

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(LENGTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Masking.largest = max(Masking.largest, int(x.max()))
        mask = torch.arange(LENGTH) < x[:, :1]
        return self.layer(mask * x.float())


class Bounded(nn.Module):
    """Scales a batch down that has large numbers, and raises for NaN, as torch does there."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(LENGTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = torch.linalg.svdvals(x.view(-1, 4, 4))
        return self.layer(x / x.abs().max().clamp(min=10.0)) + torch.tanh(size.mean(1, True))


class Product(nn.Module):
    """A product, whose gradient torch computes otherwise if there is a zero in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(LENGTH, 12, bias=False), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).view(-1, 4, 3).prod(2))


class Marked(nn.Module):
    """Does something else if there is a certain word in the batch, which no random user has."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer = nn.Embedding(WORDS, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.words(x).mean(1)
        return self.layer(h / 2 if (x == WORDS - 3).any() else h)


def by_how_many_count(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Losses over the share of the batch's targets that are not ignored."""
    losses = functional.cross_entropy(outputs, targets, reduction="none")
    return losses / (targets != -100).float().mean().clamp(min=0.1)


class RarelyDropping(nn.Module):
    """Drops its first layer once in a while, as Python's own generator says."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(LENGTH, LENGTH), nn.Linear(LENGTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x if random.random() < 1e-6 else torch.tanh(self.first(x)))


def integers(most: int, *, short: bool) -> UserStore:
    """Users who have integers up to a number; all but the first user's may end in zeros."""
    rng, rows = np.random.default_rng(0), USERS * EACH
    x = rng.integers(1, most // 3, (rows, LENGTH))
    x[:EACH] = rng.integers(most // 2, most, (EACH, LENGTH), endpoint=True)
    if short:
        x[EACH:, LENGTH // 3 :] = 0
    fields = {"x": x.astype(np.uint8 if most == 255 else np.int64), "y": rng.integers(0, 3, rows)}
    return UserStore(fields, np.arange(0, rows + 1, EACH))


def series() -> UserStore:
    store = users_of([EACH] * USERS, (LENGTH,))
    store.fields["x"][EACH:, LENGTH // 3 :] = 0.0
    return store


def with_metrics(request: RoundRequest, *metrics: Metric) -> RoundRequest:
    layout, groups = request.clipping.layout, request.clipping.groups
    names, shapes = (tuple(getattr(metric, n) for metric in metrics) for n in ("tensor", "shape"))
    layout = Layout(layout.names + names, layout.shapes + shapes)
    clipping = Clipping(layout, (*groups, *(metric.group for metric in metrics)))
    return replace(request, clipping=clipping, metrics=metrics)


def asked(model: nn.Module, store: UserStore) -> tuple[InProcessTransport, RoundRequest]:
    task = Task(model, cross_entropy)
    transport = InProcessTransport(task, store, CPU, 2**22, processes=1)
    return transport, request_under(task, LOCAL, USERS, 1.0)


def assert_apart(transport: InProcessTransport, request: RoundRequest) -> None:
    each = [alone(transport, request, user) for user in range(USERS)]
    assert all(own.any() for own in each)
    np.testing.assert_array_equal(total_of(transport, request), sum(each))


@pytest.mark.parametrize(
    ("model", "store"),
    [
        (BrightestIsOne, lambda: integers(255, short=False)),
        (lambda: Trimmed(masked=False), lambda: integers(WORDS - 1, short=True)),
        (lambda: Trimmed(masked=True), lambda: integers(WORDS - 1, short=True)),
        (TrimmedSeries, series),
    ],
    ids=["brightest", "trimmed", "trimmed and masked", "series"],
)
def test_what_looks_at_the_whole_batch_is_noticed(
    model: Callable[[], nn.Module],
    store: Callable[[], UserStore],
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(0)
    assert_apart(*asked(model(), store()))
    assert "train one at a time" in caplog.text


def test_what_large_numbers_alone_show_is_noticed_though_others_raise() -> None:
    torch.manual_seed(0)
    store = users_of([EACH] * USERS, (LENGTH,))
    store.fields["x"][: 2 * EACH] *= 1000.0
    assert_apart(*asked(Bounded(), store))


@pytest.mark.parametrize("users", [32, 33])  # of whom no number of lanes leaves any blank, and some
def test_blank_lanes_change_no_users_bits(users: int) -> None:
    torch.manual_seed(0)
    task = Task(Product(), cross_entropy)
    store = users_of([EACH] * users, (LENGTH,))
    transport = InProcessTransport(task, store, CPU, 2**22, processes=1)
    request = request_under(task, LOCAL, users, 1.0)
    each = [alone(transport, request, user) for user in range(users)]
    np.testing.assert_array_equal(total_of(transport, request), sum(each))


def test_what_one_word_decides_for_a_batch_is_decided_for_each_user() -> None:
    torch.manual_seed(0)
    store = integers(WORDS - 1, short=True)
    store.fields["x"][store.fields["x"] == WORDS - 3] = 1
    store.fields["x"][2 * EACH : 3 * EACH] = WORDS - 3
    assert_apart(*asked(Marked(), store))


def rare_or_right(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Half as much if there is an example of a rare class in the batch."""
    right = (outputs.argmax(1) == targets).float()
    return right / 2 if (targets == 2).any() else right


@pytest.mark.parametrize("layer", [nn.Tanh(), nn.PReLU()])  # of known layers, and of others
def test_own_metrics_are_of_one_user(layer: nn.Module) -> None:
    torch.manual_seed(0)
    store = users_of([EACH] * USERS, (LENGTH,), classes=2)
    store.fields["y"][2 * EACH] = 2
    task = Task(nn.Sequential(layer, nn.Linear(LENGTH, 3)), metrics={"own": rare_or_right})
    transport = InProcessTransport(task, store, CPU, 2**22, processes=1)
    request = with_metrics(request_under(task, LOCAL, USERS, 1.0), Metric("own", radius=1.0))
    assert_apart(transport, request)
    chunks = transport._chunks(request, transport._trainer.begin(request))
    assert {chunk.together for chunk in chunks} == {True}


@pytest.mark.parametrize("of", ["loss", "metric"])
def test_targets_that_are_ignored_change_no_other_user(of: str) -> None:
    torch.manual_seed(0)
    store = users_of([EACH] * USERS, (LENGTH,))
    store.fields["y"][2 * EACH : 3 * EACH - 1] = -100
    model, own = nn.Linear(LENGTH, 3), {"own": by_how_many_count}
    task = Task(model, by_how_many_count) if of == "loss" else Task(model, metrics=own)
    transport = InProcessTransport(task, store, CPU, 2**22, processes=1)
    request = request_under(task, LOCAL, USERS, 1.0)
    asking = with_metrics(request, Metric("own", radius=50.0))
    assert_apart(transport, request if of == "loss" else asking)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of nested tensors
def test_metrics_of_a_model_that_looks_at_all_masks_are_of_one_user() -> None:
    torch.manual_seed(0)
    store = integers(WORDS - 1, short=True)
    store.fields["x"][0, 1] = 0  # a gap, for which torch computes the whole batch otherwise
    transport, request = asked(Encoder(), store)
    request = replace(request, local=LocalTraining(0.5, steps=1))
    assert_apart(transport, with_metrics(request, metric("loss", bound=10.0), metric("accuracy")))


def test_metrics_that_are_drawn_come_from_the_users_own_generator() -> None:
    torch.manual_seed(0)
    transport, request = asked(AlwaysDropping(), users_of([EACH] * USERS, (LENGTH,)))
    request = with_metrics(request, metric("loss", bound=5.0), metric("accuracy"))
    expected = total_of(transport, request)
    torch.manual_seed(1)
    np.testing.assert_array_equal(total_of(transport, request), expected)
    assert_apart(transport, request)


def test_a_model_that_draws_for_some_data_only_draws_from_the_users_own_generator() -> None:
    torch.manual_seed(0)
    transport, request = asked(DrawingForSome(), users_of([EACH] * USERS, (LENGTH,)))
    assert_apart(transport, request)


def test_whether_a_round_takes_place_does_not_depend_on_how_many_are_drawn() -> None:
    transport, request = asked(InMultiples(), users_of([EACH] * USERS, (LENGTH,)))
    for count in (USERS, 1, 3, 5, 7):
        drawn = replace(request, users=request.users[:count])
        each = [alone(transport, request, user) for user in range(count)]
        np.testing.assert_array_equal(total_of(transport, drawn), sum(each))


def test_a_model_that_remembers_users_is_refused() -> None:
    transport, request = asked(Remembering(), users_of([EACH] * USERS, (LENGTH,)))
    with pytest.raises(ModelError, match="and not on who trained before"):
        list(transport.collect(request))


def test_a_model_that_draws_from_pythons_generator_is_refused() -> None:
    transport, request = asked(RarelyDropping(), users_of([EACH] * USERS, (LENGTH,)))
    with pytest.raises(ModelError, match="draws from the generators of Python's random or NumPy's"):
        list(transport.collect(request))


def test_random_users_have_no_integers_that_a_model_could_run_out_of_memory_with() -> None:
    torch.manual_seed(0)
    assert_apart(*asked(Masking(), integers(WORDS - 1, short=True)))
    assert Masking.largest == 2**10


def test_generators_that_another_thread_draws_from_are_not_the_models(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    transport, request = asked(nn.Linear(LENGTH, 3), users_of([EACH] * USERS, (LENGTH,)))
    honest, drawn = Isolation._tried, []

    def meanwhile(isolation: Isolation, asked: RoundRequest, rung: Rung) -> object:
        if not drawn:
            drawn.append(random.random())
        return honest(isolation, asked, rung)

    monkeypatch.setattr(Isolation, "_tried", meanwhile)
    assert_apart(transport, request)
    assert drawn
