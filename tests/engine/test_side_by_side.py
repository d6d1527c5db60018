"""Users side by side: as in a plain loop over them, and apart whatever a model does."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from fedpriv.data.population import UserStore
from fedpriv.engine import side_by_side as module
from fedpriv.engine.adapters import with_adapters
from fedpriv.engine.lanes import Lanes, MixingError
from fedpriv.engine.products import OuterProducts
from fedpriv.engine.roads import Path, Road
from fedpriv.engine.side_by_side import SideBySideModel
from fedpriv.engine.task import Loss, Task, cross_entropy
from fedpriv.engine.trainer import Trainer
from fedpriv.engine.transport import InProcessTransport
from fedpriv.measures.metrics import metric
from fedpriv.privacy.clipping import Clipping
from fedpriv.privacy.clipping_torch import Updates
from fedpriv.privacy.gaussian_mechanism import Metric
from fedpriv.privacy.layout import Layout
from fedpriv.training.local import SGD
from fedpriv.training.request import LocalTraining, RoundRequest
from tests.engine import plain
from tests.engine.everyone import alone, request_under, total_of, users_of

CPU, KEY = torch.device("cpu"), bytes(range(32))  # the key of `request_under`
WORDS = 7


class Computed(nn.Module):
    """A layer, and what is computed with it."""

    def __init__(self, compute: Callable[["Computed", Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.inner, self.compute = nn.Linear(6, 3), nn.Linear(6, 6), compute
        self.slopes = nn.Parameter(torch.rand(6))
        self.calls, self.rng, self.seen = 0, np.random.default_rng(0), torch.zeros(())
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, x)


def of(compute: Callable[[Computed, Tensor], Tensor]) -> Callable[[], nn.Module]:
    return lambda: Computed(compute)


class Language(nn.Module):
    """Words [B, 4] → scores [B, 7, 4], by attention, and by the embeddings themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, 6, padding_idx=2), nn.Embedding(4, 6)
        self.norm, self.layer = nn.LayerNorm(6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.words(x) + self.places(torch.arange(4)))
        h = h + functional.scaled_dot_product_attention(h, h, self.layer(h), is_causal=True)
        return functional.linear(h, self.words.weight).transpose(1, 2)


class Pieces(nn.Module):
    """A layer of parts of an example, and one of what they give."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 4), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.tanh(self.one(x.view(-1, 2, 3))).flatten(1))


class Turned(nn.Module):
    """Scores [B, 4, 7] → [B, 7, 4]."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mT


class Branches(nn.Module):
    """Adds two layers, reads its input twice, and has weights that are in no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.w = nn.Linear(6, 3), nn.Linear(6, 3), nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return (self.one(x * self.w) + self.two(x)) * (x.sum(1, keepdim=True) < 1e3)


def images() -> nn.Module:
    """[B, 2, 9, 7] through all that a convolution can do."""
    return nn.Sequential(
        nn.Conv2d(2, 4, (3, 2), stride=(2, 1), padding=(1, 2), bias=False),
        nn.GroupNorm(2, 4),
        nn.Tanh(),
        nn.MaxPool2d(2, stride=1),
        nn.Conv2d(4, 3, 2, dilation=(1, 2)),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(63, 5),
        nn.PReLU(),
    )


def frozen_between() -> nn.Module:
    first, frozen, last = nn.Conv2d(2, 3, 2), nn.Conv2d(3, 4, 2, stride=2), nn.Conv2d(4, 2, 2)
    frozen.requires_grad_(requires_grad=False)
    layers = first, nn.Tanh(), frozen, nn.Tanh(), last, nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(12, 3))


def adapted() -> nn.Module:
    """Adapters that say something, of an embedding and of layers."""
    layers = nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, WORDS)
    model = with_adapters(nn.Sequential(nn.Embedding(WORDS, 6), *layers, Turned()), 2, 4.0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.5)
    return model


ADAPTERS = {"0.lora_B.weight", *(f"{n}.lora_{ab}.weight" for n in (1, 3) for ab in "AB")}
# Model, shape of an example (none: words), and which layers may learn without weights.
KINDS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], set[str]]] = {
    "bare": (lambda: nn.Linear(6, 3), (6,), {"weight"}),
    "deep": (lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(True), nn.Linear(5, 3)), (6,),
             {"0.weight", "2.weight"}),
    "pieces": (Pieces, (6,), {"one.weight", "two.weight"}),
    "twice": (of(lambda m, x: m.layer(m.inner(torch.tanh(m.inner(x * m.slopes))))), (6,),
              {"layer.weight"}),
    "branches": (Branches, (6,), {"one.weight", "two.weight"}),
    "language": (Language, (), {"layer.weight"}),
    "adapted": (adapted, (), ADAPTERS),
    "images": (images, (2, 9, 7), {"7.weight"}),
    "frozen": (frozen_between, (2, 9, 7), {"6.weight"}),
}  # fmt: skip
LOCALS = {
    "epochs": LocalTraining(0.1, batch_size=3, epochs=2),
    "steps": LocalTraining(0.1, batch_size=7, steps=4, momentum=0.9, proximal=0.5),
    "whole": LocalTraining(0.3, epochs=2, max_examples=8),
}
SIZES = [5, 1, 12, 4, 5, 8]


def store_for(kind: str, sizes: Sequence[int] = SIZES) -> UserStore:
    shape = KINDS[kind][1]
    if shape:
        return users_of(sizes, shape)
    x, y = np.random.default_rng(0).integers(0, WORDS, (2, sum(sizes), 4))
    return UserStore({"x": x, "y": y}, np.cumsum([0, *sizes]))


def trained(
    task: Task, store: UserStore, local: LocalTraining
) -> Iterator[tuple[int, Updates, int]]:
    """Each user of all chunks, and in which lane of which updates it is."""
    trainer = Trainer(task, store, None, CPU, 2**22, "float32")
    request = request_under(task, local, store.population, 1.0)
    start, everyone = trainer.begin(request), np.arange(store.population)
    for chunk in Road((4, 2), 3).chunks(trainer, local, everyone, store.sizes):
        found = trainer.sent(request, start, chunk)
        yield from ((int(user), found, lane) for lane, user in enumerate(chunk.users))


@pytest.mark.parametrize("touches", [0, 10**9], ids=["weights", "without"])
@pytest.mark.parametrize("way", LOCALS)
@pytest.mark.parametrize("kind", KINDS)
def test_users_move_as_in_a_plain_loop(
    kind: str, way: str, touches: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With lanes that fill up, users who end before others, and batches of several slices."""
    monkeypatch.setattr(module, "_TOUCHES", touches)
    torch.manual_seed(0)
    make, _, layers = KINDS[kind]
    task, store, local = Task(make(), cross_entropy), store_for(kind), LOCALS[way]
    expected = plain.moved(task, store, range(len(SIZES)), local, KEY)
    lean, seen = set[str](), []
    for user, found, lane in trained(task, store, local):
        seen.append(user)
        lean |= {name for name, update in found.items() if isinstance(update, OuterProducts)}
        assert found.keys() == expected.keys()
        for name, update in found.items():
            scale = max(1.0, float(expected[name].abs().max()))
            mine, wanted = update[lane : lane + 1][0], expected[name][user]
            torch.testing.assert_close(mine, wanted, rtol=1e-3, atol=2e-5 * scale, msg=name)
    assert sorted(seen) == [*range(len(SIZES))]
    assert all(float(update.abs().max()) > 1e-4 for update in expected.values())
    assert lean == (layers if touches and way != "steps" else set())


@pytest.mark.parametrize("touches", [0, 10**9], ids=["weights", "without"])
@pytest.mark.parametrize("kind", ["deep", "branches", "images", "language"])
def test_users_who_break_down_change_nobody_elses_bits(
    kind: str, touches: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_TOUCHES", touches)
    torch.manual_seed(0)
    task, local = Task(KINDS[kind][0](), cross_entropy), LOCALS["epochs"]
    good, bad = store_for(kind, [5] * 6), store_for(kind, [5] * 6)
    for user, value in ((1, 3.0 if kind == "language" else np.nan), (4, 1e30)):
        bad.fields["x"][bad.rows_of(user)] = WORDS - 1 if kind == "language" else value
    pairs = zip(trained(task, good, local), trained(task, bad, local), strict=True)
    for (user, one, lane), (same, other, place) in pairs:
        assert (user, lane) == (same, place)
        mine = slice(lane, lane + 1)
        alike = [torch.equal(update[mine], other[name][mine]) for name, update in one.items()]
        assert all(alike) == (user not in (1, 4))


# What would get from one user's lane into another's: refused, or of no effect.


class MeanGradient(torch.autograd.Function):
    """Passes back what is left of gradients without their mean over all rows."""

    @staticmethod
    def forward(_: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: object, *gradients: Tensor) -> Tensor:
        return gradients[0] - gradients[0].mean(0)


def less_mean(x: Tensor) -> Tensor:
    return x - x.mean(0)


def compiled(x: Tensor) -> Tensor:
    found: Tensor = torch.jit.script(less_mean)(x)
    return found


def hooked(model: Computed, x: Tensor) -> Tensor:
    y = model.layer(x)
    y.register_hook(lambda back: back - back.mean(0))
    return y


def drawing(model: Computed, x: Tensor) -> Tensor:
    return model.layer(x + torch.randn(6))


def later(model: Computed, x: Tensor) -> Tensor:
    model.calls += 1
    return MeanGradient.apply(model.layer(x)) if model.calls > 1 else model.layer(x)


ESCAPES: dict[str, Callable[[Computed, Tensor], Tensor]] = {
    "own gradients": lambda m, x: MeanGradient.apply(m.layer(x)),
    "own gradients of many": lambda m, x: (MeanGradient.apply if len(x) > 2 else abs)(m.layer(x)),
    "own gradients later": later,
    "hook": hooked,
    "drawn for all": drawing,
    "drawn by NumPy": lambda m, x: m.layer(x * float(np.random.random())),
    "drawn by Python": lambda m, x: m.layer(x * random.random()),
    "another class": lambda m, x: m.layer(x - x.as_subclass(Tensor).mean(0)),
    "copied": lambda m, x: m.layer(x * torch.Tensor(x).mean(0)),
    "floats": lambda m, x: m.layer(x * torch.FloatTensor(x).mean(0)),
    "storage": lambda m, x: m.layer(x * torch.zeros(0).set_(x.detach()).mean(0)),
    "data": lambda m, x: m.layer(x - x.data.mean(0)),
    "parameter": lambda m, x: m.layer(x - nn.Parameter(x).mean(0)),
    "vmap": lambda m, x: m.layer(x * torch.vmap(lambda c: c.mean(), in_dims=1)(x)),
    "vmap of outputs": lambda m, x: torch.vmap(lambda c: c - c.mean(), 1, 1)(m.layer(x)),
    "gradient": lambda m, x: m.layer(x * torch.func.grad(lambda c: c.square().mean())(x).sum()),
    "compiled": lambda m, x: m.layer(compiled(x)),
    "compiled last": lambda m, x: compiled(m.layer(x)),
    "kept": lambda m, x: (setattr(m, "seen", x.detach()), m.layer(x * m.seen.mean(0)))[1],
    "buffer": lambda m, x: m.layer(x * m.count.copy_(x.detach().mean())),
}  # fmt: skip


def squares(outputs: Tensor, _: Tensor) -> Tensor:
    """A loss that reads no targets."""
    return outputs.square().sum(1)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("loss", [cross_entropy, squares], ids=["classes", "squares"])
@pytest.mark.parametrize("escape", ESCAPES)
def test_no_way_out_of_a_lane_leads_into_another(escape: str, loss: Loss) -> None:
    torch.manual_seed(0)
    task = Task(Computed(ESCAPES[escape]), loss)
    x, y = torch.randn(8, 6), torch.arange(8) % 3
    other = x.clone()
    other[2:4] = 5.0 * other[2:4] + 1.0
    try:
        found, changed = (losses_and_gradients(task, rows, y) for rows in (x, other))
    except MixingError:
        return
    for one, same in zip(found, changed, strict=True):
        assert torch.equal(one[[0, 2, 3]], same[[0, 2, 3]])
    assert not torch.equal(found[0][1], changed[0][1])


def losses_and_gradients(task: Task, x: Tensor, y: Tensor) -> list[Tensor]:
    """Of four users in two slices one after another: [4, …] each."""
    model = SideBySideModel.of(
        task, task.model, torch.zeros(2, 6), torch.zeros(2, dtype=torch.int64)
    )
    own = {n: p.expand(4, *p.shape).clone().requires_grad_() for n, p in task.trainable().items()}
    found = list[Tensor]()
    for _ in range(2):
        losses = model.losses(task, Lanes(4), own, x.clone(), y)
        gradients = torch.autograd.grad(losses.sum(), [*own.values()], materialize_grads=True)
        found += losses.view(4, 2), *gradients
    return found


# Whole rounds: sums of cohorts are sums of what each user gives by itself.

EACH, LENGTH = 4, 6


def counting(model: Computed, x: Tensor) -> Tensor:
    model.calls += 1
    return model.layer(x) / model.calls


def counting_in_a_buffer(model: Computed, x: Tensor) -> Tensor:
    return model.layer(x) / model.count.add_(1.0)


def remembering(model: Computed, x: Tensor) -> Tensor:
    scale, model.seen = model.seen, torch.maximum(model.seen, x.detach().abs().max())
    return model.layer(x / (1.0 + scale))


def in_multiples(model: Computed, x: Tensor) -> Tensor:
    if len(x) > 8 and len(x) % 16:
        raise ValueError("not a multiple of 16")
    return model.layer(x)


def drawing_for_some(model: Computed, x: Tensor) -> Tensor:
    large = float(x.detach().abs().max()) > 2.0
    return model.layer(x + torch.randn_like(x) if large else x)


def by_how_many_count(outputs: Tensor, targets: Tensor) -> Tensor:
    """Losses over the share of the batch's targets that are not ignored."""
    losses = functional.cross_entropy(outputs, targets, reduction="none")
    return losses / (targets != -100).float().mean().clamp(min=0.1)


def largest_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Of outputs [B, 1] and targets [B], between which torch makes [B, B] differences."""
    errors = functional.mse_loss(outputs[:, :1], targets.float(), reduction="none")
    return errors.amax(1)


STATES = {
    "counting": of(counting),
    "counting in a buffer": of(counting_in_a_buffer),
    "remembering": of(remembering),
    "skipping": of(lambda m, x: m.layer(x * (1.0 + float(m.rng.random() < 0.5)))),
    "in multiples": of(in_multiples),
    "by how many": of(lambda m, x: m.layer(x) / len(x)),
    "checkpointed": of(lambda m, x: m.layer(checkpoint(m.inner, x, use_reentrant=False))),
    "weights as rows": of(lambda m, x: m.layer(x * m.slopes.type_as(x))),
    "drawing for some": of(drawing_for_some),
    "dropping": lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3)),
    "brightest": of(lambda m, x: m.layer(x / x.abs().max().clamp(min=1.0))),
    "brightest, by axes": of(lambda m, x: m.layer(x / x.abs().amax((), keepdim=True))),
    "pairs": of(lambda m, x: m.layer(x) * functional.linear(x, x).amax(1, keepdim=True)),
    "marked": of(lambda m, x: m.layer(x / 2 if (x > 2.5).any() else x)),
    "product": lambda: nn.Sequential(nn.Linear(6, 12), nn.Unflatten(1, (4, 3)), Product()),
}


class Product(nn.Module):
    """A product, whose gradient torch computes otherwise if there is a zero in the batch."""

    def forward(self, x: Tensor) -> Tensor:
        return x.prod(1)


def round_of(
    task: Task, store: UserStore, local: LocalTraining, path: Path = "auto"
) -> tuple[InProcessTransport, RoundRequest]:
    given = task, store, CPU, 2**22
    transport = InProcessTransport(*given, processes=1, path=path)
    return transport, request_under(task, local, store.population, 1.0)


def assert_apart(transport: InProcessTransport, request: RoundRequest) -> None:
    each = [alone(transport, request, int(user)) for user in request.users]
    assert all(own.any() for own in each)
    for users in (request.users, request.users[::2], request.users[:3]):
        total = total_of(transport, replace(request, users=users))
        np.testing.assert_array_equal(total, sum(each[user] for user in users))


@pytest.mark.parametrize("sizes", [[EACH] * 8, [EACH] * 6 + [40, 70]], ids=["equal", "unequal"])
@pytest.mark.parametrize("kind", STATES)
def test_what_a_user_gives_does_not_depend_on_who_else_trains(kind: str, sizes: list[int]) -> None:
    torch.manual_seed(0)
    task, store = Task(STATES[kind](), cross_entropy), users_of(sizes)
    store.fields["x"][:EACH] *= 3.0
    assert_apart(*round_of(task, store, SGD(0.1, epochs=2)))


@pytest.mark.filterwarnings("ignore:Using a target size:UserWarning")
@pytest.mark.parametrize("loss", [by_how_many_count, largest_error])
def test_losses_of_a_user_are_of_its_own_rows(loss: Loss) -> None:
    torch.manual_seed(0)
    store = users_of([EACH] * 8)
    if loss is by_how_many_count:
        store.fields["y"][2 * EACH : 3 * EACH - 1] = -100
    assert_apart(*round_of(Task(nn.Linear(6, 3), loss), store, SGD(0.1, batch_size=2, epochs=1)))


@pytest.mark.parametrize("sizes", [[EACH] * 8, [EACH] * 5 + [40, 70]], ids=["equal", "unequal"])
def test_an_input_that_is_the_target_too_and_is_changed_in_place(sizes: list[int]) -> None:
    def error(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).square().mean(1)

    torch.manual_seed(0)
    task = Task(of(lambda m, x: m.inner(x.mul_(0.5)))(), error, targets="x")
    assert_apart(*round_of(task, users_of(sizes), SGD(0.1, epochs=1)))


def with_metrics(request: RoundRequest, *metrics: Metric) -> RoundRequest:
    layout, groups = request.clipping.layout, request.clipping.groups
    names, shapes = (tuple(getattr(metric, n) for metric in metrics) for n in ("tensor", "shape"))
    layout = Layout(layout.names + names, layout.shapes + shapes)
    clipping = Clipping(layout, (*groups, *(metric.group for metric in metrics)))
    return replace(request, clipping=clipping, metrics=metrics)


def rare_or_right(outputs: Tensor, targets: Tensor) -> Tensor:
    """Half as much if there is an example of a rare class in the batch."""
    right = (outputs.argmax(1) == targets).float()
    return right / 2 if (targets == 2).any() else right


@pytest.mark.parametrize("path", ["alone", "together"])
def test_own_metrics_are_of_one_user(path: Path) -> None:
    torch.manual_seed(0)
    store = users_of([EACH] * 8, classes=2)
    store.fields["y"][2 * EACH] = 2
    own = {"own": rare_or_right, "share": by_how_many_count}
    transport, request = round_of(
        Task(nn.Linear(6, 3), metrics=own), store, SGD(0.1, steps=2), path
    )
    asked = Metric("own", radius=1.0), Metric("share", radius=50.0)
    assert_apart(transport, with_metrics(request, *asked))


class Encoder(nn.Module):
    """torch's own, which has another way to compute where all masks of a batch end alike."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer = nn.Embedding(50, 8, padding_idx=0), nn.Linear(8, 3)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.encoder(self.words(x), src_key_padding_mask=x == 0)
        return self.layer(functional.dropout(h, 0.3).mean(1))


@pytest.mark.filterwarnings("ignore::UserWarning")  # of nested tensors
def test_metrics_of_a_model_that_looks_at_all_masks_and_draws_are_of_one_user() -> None:
    torch.manual_seed(0)
    x = np.random.default_rng(0).integers(1, 50, (8 * EACH, LENGTH))
    x[EACH:, LENGTH // 3 :] = 0
    x[0, 1] = 0  # a gap, for which torch computes the whole batch otherwise
    store = UserStore({"x": x, "y": np.arange(len(x)) % 3}, np.arange(9) * EACH)
    transport, request = round_of(Task(Encoder(), cross_entropy), store, SGD(0.5, steps=1))
    request = with_metrics(request, metric("loss", bound=10.0), metric("accuracy"))
    expected = total_of(transport, request)
    torch.manual_seed(1)
    np.testing.assert_array_equal(total_of(transport, request), expected)
    assert_apart(transport, request)
