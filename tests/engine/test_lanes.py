"""Functions of torch for users side by side: each as for a user alone, and none that would mix."""

import copy
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from fedpriv.engine import lanes as module
from fedpriv.engine.lanes import Done, Lanes, MixingError, Rows, Weights
from fedpriv.engine.task import cross_entropy

# What the lines below compute with: weights of each user, and what all share, in capitals. Besides,
# each user has rows: x and z, [W, 4, 3], words i, [W, 4], and classes y, [W].
OWN = {
    "w": (3,), "v": (5, 3), "b": (5,), "t": (4, 3), "s": (1, 4, 3), "g": (4,), "o": (1,),
    "u": (2, 4, 2), "k": (2, 1, 2, 2),
}  # fmt: skip
SHARED = {"W": (3,), "V": (5, 3), "B": (5,), "T": (4, 3), "G": (4,), "K": (2, 1, 2, 2)}

TERNARY = """
x.addcdiv(w, z + 1) | x.addcmul(w, z) | x.lerp(z, w) | torch.where(x > 0.5, x, w) | x.copysign(-w)
x.masked_fill(i[:, :, None] > 1, 2.0) | x.clamp(0.3, 0.6) | x.clamp(max=w) | x.clamp_max(0.5)
x.clip(w) | x.clamp_min(0.5) | F.threshold(x, 0.5, 0.0) | x.to(torch.float64) | i.type_as(x[..., 0])
torch.full_like(x, 2.0)
"""
INTEGER = """
bitwise_and bitwise_or bitwise_xor __and__ __or__ __xor__ __rand__ __ror__ __rxor__ bitwise_not
__invert__
"""
STEPS = ("floor_divide", "__floordiv__", "__rfloordiv__", "heaviside")  # without a gradient
BINARY = """
add sub mul div divide multiply subtract true_divide fmod remainder pow atan2 maximum minimum
eq ne ge gt le lt greater less logaddexp xlogy logical_and logical_or logical_xor
__eq__ __ge__ __gt__ __le__ __lt__ __ne__ __radd__ __rdiv__ __rmod__ __rmul__ __rpow__
__rsub__ __rtruediv__ __add__ __sub__ __mul__ __truediv__ __div__ __mod__ __pow__
"""
ALONG = """
all amax amin any argmax argmin argsort cumprod cumsum flip logcumsumexp logsumexp max mean median
min prod sort squeeze std sum unbind unsqueeze var log_softmax softmax
"""
POOLS = [f"{kind}_pool" for kind in ("max", "avg", "adaptive_max", "adaptive_avg")]
LAYERS = """
F.linear(x, v, b) | F.linear(x, v) | F.linear(x, V, b) | F.linear(x, v, B) | F.linear(x, V, B)
F.linear(F.embedding(i, t), t) | F.linear(x, v[1:3], b[1:3]) | F.linear(x, v * 2 + W) | x + s
x @ v.t() | x @ v.T | x @ v.mT | x @ T.mT | x.matmul(v.transpose(0, 1)) | x @ x.mT
x.bmm(z.transpose(1, 2)) | x[:, None] @ z.mT[:, None] | x[:, 0].mm(v.t()) | x.__matmul__(T.mT)
T.mT.__rmatmul__(x) | F.conv1d(x, u) | F.conv1d(x, u, b[:2], 1, 2, 2)
F.conv1d(x, u, None, 2, (1,)) | F.conv2d(x[:, None], k)
F.conv2d(x.unsqueeze(1), k, b[:2], (2, 1), (0, 1), 1) | x + F.relu(x * w)
F.conv2d(x[:, None], K, B[:2], dilation=(2, 1), padding=1) | F.conv2d(x[:, None], K)
F.embedding(i, T) | F.embedding(i, t) | F.embedding(i, t, padding_idx=2)
F.embedding(i, t, padding_idx=-1) | x * s[0, 1] | F.embedding(i[:, 0], t)
x + F.embedding(torch.arange(4), t) | x + F.embedding(Z.expand_as(i), t)
F.layer_norm(x, (3,), w, W) | F.layer_norm(x, (4, 3)) | F.layer_norm(x, (4, 3), t, s[0]) | x * o
F.rms_norm(x, (3,), w) | F.rms_norm(x, (3,)) | F.group_norm(x, 2, g, G) | F.group_norm(x, 4)
F.prelu(x - 0.5, o) | F.prelu(x - 0.5, g) | F.prelu(x - 0.5, G) | F.dropout(x, 0.5, training=False)
F.dropout(x, p=0.0) | F.dropout(x, 1.0) | F.scaled_dot_product_attention(x, z, x * w)
F.scaled_dot_product_attention(x, z, x, is_causal=True)
F.scaled_dot_product_attention(x, z, x, torch.ones(4, 4).tril().bool())
F.scaled_dot_product_attention(x, z, x, attn_mask=(x @ x.mT) > 0.8)
"""
SHAPES = """
x.view(-1, 4, 3) | x.view(len(x), -1) | x.reshape(-1, 12) | x.flatten(1) | x.flatten(-2) | x[..., 0]
x.permute(0, 2, 1) | x.transpose(-1, 1) | x.swapaxes(1, 2) | x.swapdims(1, 2) | x[:, 1:, 0]
x.tril() | x[:, None, ..., :2] | x[:, :1].expand(-1, 4, -1) | x[:, :1].expand_as(x)
W.expand_as(x) * x | x * x.new_zeros(len(x), 4, 1) | x + x.new_full((1, 4, 3), 2.0)
x.new_ones(len(x), 4, 3) * x | x.triu(1) | F.pad(x, (1, 2)) | F.pad(x, (1, 0, 0, 1), value=3.0)
F.pad(x, (1, 1), mode="circular") | x.data | torch.cat([x, z], 1) | torch.concat((x, z), -1)
torch.concatenate([x, z], dim=2) | F.one_hot(i, 5) | torch.stack([x, z], 1) | x.chunk(2, 1)
x.split(3, 1) | x.split([1, 3], dim=1) | x.narrow(1, 1, 2) | x.tensor_split(2, 1) | x.topk(2, dim=1)
x.select(2, 1) | F.softmin(x, 1) | x.norm(2, 1) | x.mT | torch.norm(x, dim=2)
F.cosine_similarity(x, z, dim=1) | F.normalize(x) | F.normalize(x, dim=2) | F.glu(x[:, :, :2])
x.sum((1, 2)) | x.mean(dim=-1, keepdim=True) | x.clone().add_(w) | x.flip(1, 2)
x.transpose(0, 1)[1] | torch.cat(x.permute(1, 0, 2).unbind(), 1) | x[:, 0].t().transpose(0, 1)
x.swapaxes(0, 2).permute(2, 1, 0) | x.swapdims(0, 2)[0].swapaxes(0, 1) | v.data + x[:, :1, :1]
x.unfold(1, 2, 1) | x.clone().mul_(z).sub_(1) | F.relu(x - 0.5, inplace=True)
x[:, 0].T.transpose(1, 0)
x + v.view(15)[:3]
"""
LOSSES = """
F.cross_entropy(x[:, 0], y, reduction="none") | cross_entropy(x.mT, i % 3)
F.cross_entropy(x[:, 0], y, W.abs(), ignore_index=1, label_smoothing=0.2, reduction="none")
F.cross_entropy(x.mT, i % 3, ignore_index=2, reduction="none") | F.mse_loss(x, z, reduction="none")
F.nll_loss(x.log_softmax(2)[:, 1], y, W.abs(), reduction="none") | F.l1_loss(x, z, reduction="none")
F.smooth_l1_loss(x, z, reduction="none", beta=0.1) | F.huber_loss(x, z, reduction="none", delta=0.1)
F.binary_cross_entropy(x.nan_to_num().clamp(0, 1), (z > 0.5).float(), reduction="none")
F.binary_cross_entropy_with_logits(x, z.detach(), pos_weight=W.abs(), reduction="none")
"""


def lines_of(text: str) -> list[str]:
    """Expressions of Python, one a line or between bars."""
    return [line for line in re.split(r" \| |\n", text) if line]


def pointwise_lines() -> Iterator[str]:
    """Lines for the functions of numbers in the table that are not above."""
    known = [name for name, rule in module._RULES.items() if rule is module._pointwise]
    for name in {*known} - {*re.findall(r"(\w+)\(", TERNARY), "data", "_threshold", "threshold"}:
        if name in INTEGER.split():
            yield f"i.{name}({'' if 'not' in name or 'inv' in name else 'i + 1'})"
        elif name.startswith("__i"):
            yield f"x.clone().{name}(w)"
        elif name in STEPS:
            yield from (f"x.detach().{name}(w.detach())", f"w.data.{name}(x.data)")
        elif name in BINARY.split():
            yield from (f"x.{name}(w)", f"w.{name}(x)", f"x.{name}(z)")
        elif hasattr(Tensor, name):
            yield from (f"x.{name}()", f"x * w.{name}()")
        else:
            own = {"log_sigmoid": "logsigmoid"}.get(name, name)  # as torch calls it outside
            of = "F" if hasattr(functional, own) else "torch"
            yield from (f"{of}.{own}(x)", f"x * {of}.{own}(w)")


POOLED = ((1, "x", 2), (2, "x[:, None]", 2), (3, "x[:, None, None]", (1, 2, 2)))
KNOWN = [
    *sorted(pointwise_lines()),
    *(line for text in (TERNARY, LAYERS, SHAPES, LOSSES) for line in lines_of(text)),
    *(f"x.{name}({dim})" for name in ALONG.split() for dim in (1, -1)),
    *(f"F.{name}{n}d({x}, {size})" for name in POOLS for n, x, size in POOLED),
]

# What would put one user's numbers into another's rows, or where no one knows whose they are.
MIXING = """
x.mean() | x.sum() | x.mean(0) | x - x.mean(0, keepdim=True) | x.sum(-3) | x.amax((0, 1)) | x.max()
x.argmax() | x.argmax(None, True) | x.std() | x.norm() | x.median() | x.any() | x.softmax(0)
x.sort(0) | x.sum((), True) | x.mean(dim=[], keepdim=True) | x.amax((), keepdim=True)
x.norm(2, (), keepdim=True) | x.logsumexp((), True) | x.flip(0) | x.flip(1, 0) | x.flip((0,))
x.cumsum(0) | F.normalize(x, dim=0) | F.softmax(x[:, 0, 0]) | F.cosine_similarity(x, x, dim=0)
x.unbind() | [*x] | x[0] | x[:1] | x[1:] | x[-1] | x[[1, 0]] | x[x > 0.5] | x[None] | x[i > 0]
x[..., 0, 0, 0] | x.select(0, 0) | x.narrow(0, 0, 1) | x.roll(1, 0) | x.roll(0) | x.roll(1)
x.view(-1) | x.view(-1, 6) | x.reshape(2, -1) | x.reshape(-1, 24) | x.view(1, -1) | x.flatten()
x.flatten(0, 1) | x.ravel() | x.squeeze() | x.unsqueeze(0) | x.T + x.T | x.unflatten(0, (2, -1))
x.as_strided((8, 3), (0, 1)) | x.unfold(0, 2, 1) | x.movedim(0, 1).sum(1) | x.transpose(0, 1).sum(1)
x.permute(1, 2, 0).flatten(1) | x.transpose(0, 1).cumsum(1) | x.permute(1, 0, 2) + 1
x.transpose(0, 1).transpose(0, 1)[0] | x.view(torch.int32) | x.item() | x.tolist() | x.numpy()
x.cpu() | np.asarray(x) | float(x[:, 0, 0]) | int(x) | bool(x) | repr(x) | str(x) | copy(x)
deepcopy(x) | dumps(x) | x.untyped_storage() | x.data_ptr() | x.data.mean(0) | x.data.item()
x.detach().mean() | x.grad | torch.from_dlpack(x) | torch.tensor(x) | torch.as_tensor(x)
x.new_tensor(x) | x.copy_(z) | x.__setitem__(0, z[:, 0]) | x.__setitem__((slice(None), 0), W)
W.copy_(x) | W.add_(x) | torch.add(x, z, out=torch.zeros(8, 4, 3)) | x.resize_(2, 3)
x.bernoulli_() | w.add_(1) | w.data.clamp_(0, 1) | w.copy_(W) | v.fill_(0) | F.relu_(w)
torch.zeros(8, 4, 3).add_(x) | x.normal_() | torch.rand_like(x) | torch.bernoulli(x)
F.dropout2d(x[:, None], 0.5) | x.uniform_() | torch.stack([x, x]) | torch.cat([x, x])
torch.cat([x, torch.zeros(8, 4, 3)], 1) | torch.cat([x, T[None]], 1) | x.split(2) | x.chunk(2)
x.tensor_split(2) | torch.vsplit(x, 2) | F.pad(x, (0, 0, 0, 0, 1, 0)) | x[:, 0] @ x[:, 0].t()
x[:, 0].t() @ x[:, 0] | x[:, 0].T @ T | F.linear(x[:, 0], x[:, 0]) | x @ x[:, 0].mT
F.linear(x[:, 0], torch.ones(8, 3), x[:, 0, 0]) | torch.ones(2, 8) @ x[:, 0]
x[:, 0, 0] @ x[:, 0, 0] | torch.einsum("nij,nij->ij", x, x) | torch.tensordot(x, x, ([0], [0]))
torch.cdist(x, x) | torch.outer(W, W * x) | torch.addmm(T, x[:, 0], T.mT) | torch.cov(x[:, 0].t())
torch.mm(x[:, 0], x.new_ones(3, 8)) @ x[:, 0] | F.conv2d(x[:, None], x[:, None]) | F.conv1d(x, x)
F.conv1d(x[:, 0], u) | F.conv1d(x.mT, T[None].mT, groups=4) | F.embedding(i, x[:, 0])
F.embedding(i, w[None], max_norm=1.0) | F.embedding_bag(i, t)
F.embedding(i, t, scale_grad_by_freq=True) | F.embedding(i, t, sparse=True)
F.embedding(i, T, max_norm=1.0) | F.prelu(z[:, :, 0, None].expand(-1, -1, 8).mT, x[:, 0, 0])
F.layer_norm(x, x.shape) | F.rms_norm(x, [*x.shape])
F.group_norm(z[:, :, 0, None].expand(-1, -1, 8).mT, 1, x[:, 0, 0])
F.batch_norm(x, None, None, training=True) | F.instance_norm(x) | F.local_response_norm(x, 2)
F.max_pool1d(x[:, 0], 2) | F.avg_pool1d(x[:, 0], 2)
F.scaled_dot_product_attention(x[:, 0], x[:, 0], x[:, 0])
F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
F.scaled_dot_product_attention(*[x.new_ones(8, 8, 1)] * 3, attn_mask=x.new_zeros(8, 8))
F.mse_loss(x[:, :1, 0], x[:, 0, 0], reduction="none")
F.l1_loss(x[:, 0, :1], y.float(), reduction="none")
F.huber_loss(x[:, :1, 0], y.float(), reduction="none") | F.mse_loss(x, z)
F.mse_loss(x, z, reduction="sum") | F.smooth_l1_loss(x[:, :1, 0], y.float(), reduction="none")
F.mse_loss(x, z, reduce=True, reduction="none")
F.cross_entropy(x.new_ones(8, 8), y, weight=x[:, 0, 0], reduction="none")
F.cross_entropy(x[:, 0], y)
F.binary_cross_entropy_with_logits(*[x.new_ones(8, 8)] * 2, pos_weight=x[:, 0, 0], reduction="none")
F.binary_cross_entropy(*[x.new_ones(8, 8)] * 2, weight=x[:, 0, 0], reduction="none")
x[:, 0, 0].expand_as(x.new_zeros(8, 8)) | x[:, 0].expand(8, 8, 3) | x.expand(2, 8, 4, 3)
x * x[:, 0] | x + torch.zeros(8, 4, 3) | x + torch.arange(8.0)[:, None, None] | torch.where(x > 0)
x.nonzero() | x.unique() | x.gather(0, i[:, :, None]) | x.scatter_add(0, i[:, :, None], z)
x.index_select(0, W.long()) | torch.ops.aten.mean(x) | torch.ops.aten.mean.dim(x, [0])
torch.ops.aten.embedding(x[:, 0], i) | x.take(i) | torch.autograd.grad(x.sum(1).sum(1), x)
x.register_hook(print) | x.backward() | x.retain_grad() | torch.equal(x, z) | torch.allclose(x, z)
x.is_nonzero() | torch.histc(x) | torch.bincount(y) | x.masked_select(x > 0)
torch.autograd.functional.jacobian(torch.sum, x) | torch.linalg.norm(x)
torch.nn.Parameter(x).mean(0) | torch._VF.lstm_cell(x[:, 0], (x[:, 0],) * 2, V, V)
x.__reduce_ex__(4)
"""

# Weights where they stand for something else: refused, or as for a user alone.
ELSEWHERE = """
torch.embedding(t, i) | F.scaled_dot_product_attention(x, z, x, attn_mask=t @ T.mT)
x * w.type_as(x) | F.scaled_dot_product_attention(x, z, x, attn_mask=(v @ v.mT)[:4, :4])
torch.dropout(x, p=0.5, train=False)
F.scaled_dot_product_attention(x, z, x, attn_mask=s[:, :, :1]) | x * w.to(x) | x.to(w)
W.type_as(x) * x | F.cross_entropy(x[:, 0], y, w.detach(), reduction="none")
F.pad(x, (1, 1), value=o.detach()[0]) | x * w.new_ones(3)
F.binary_cross_entropy_with_logits(x, z.detach(), pos_weight=w.detach(), reduction="none")
w + x.new_zeros(3) | x[:, :1] * (s[0] * s[0].new_ones(4, 3))[:1] | x + o * o.new_ones(1)
F.conv1d(x, T[None].expand(2, 4, 3), b[:2]) | torch.ops.aten.linear(x, v)
torch.conv1d(x, u, padding="valid") | F.linear(x, w) | v @ x.mT | x @ w | F.max_pool2d(x, 2)
F.avg_pool2d(x, 2) | F.group_norm(x, 2, g) | torch.cat([x, t.expand(len(x), 4, 3)], 1)
t.expand(len(x), 4, 3) + x | F.embedding(i, t.detach()) | x.mul(v[1])
"""


def of_users(users: int, rows: int, seed: int) -> dict[str, Tensor]:
    """All that is each user's, [L, …]; numbers are where every function is smooth."""
    rng = torch.Generator().manual_seed(seed)
    drawn = {
        name: 0.1 + 0.8 * torch.rand((users, *shape), generator=rng) for name, shape in OWN.items()
    }
    drawn |= {n: 0.1 + 0.8 * torch.rand((users, rows, 4, 3), generator=rng) for n in "xz"}
    for name, shape in {"i": (users, rows, 4), "y": (users, rows)}.items():
        drawn[name] = torch.randint(0, 3, shape, generator=rng)
    return drawn


@cache
def names_of() -> dict[str, Any]:
    """What lines may name beside tensors of users."""
    rng = torch.Generator().manual_seed(9)
    known = {"torch": torch, "F": functional, "np": np, "cross_entropy": cross_entropy}
    known |= {"copy": copy.copy, "deepcopy": copy.deepcopy, "dumps": pickle.dumps}
    shared = {n: torch.rand(shape, generator=rng) for n, shape in SHARED.items()}
    return {**known, **shared, "Z": torch.tensor([3, 0, 1, 3])}


def leaves_of(line: str, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those that a line names."""
    named = {name: own[name] for name in re.findall(r"\b[a-z]\b", line) if name in own}
    return {n: t.clone().requires_grad_(t.is_floating_point()) for n, t in named.items()}


def tensors_in(found: Any) -> list[Tensor]:
    return [*found] if isinstance(found, tuple | list) else [found]


def gradients(found: Sequence[Tensor], leaves: Mapping[str, Tensor]) -> list[Tensor]:
    """Gradients of a weighted sum of what was found, [L, …] each."""
    given = [leaf for leaf in leaves.values() if leaf.requires_grad]
    some = [each for each in found if each.requires_grad]
    if not some:
        return [torch.zeros_like(leaf) for leaf in given]
    total = sum(
        (each * torch.arange(each[0].numel()).view_as(each[0]).cos()).sum() for each in some
    )
    return [*torch.autograd.grad(total, given, materialize_grads=True)]


def side_by_side(
    line: str, own: Mapping[str, Tensor], calls: list[Done] | None = None
) -> list[Tensor]:
    """What a line gives users [L, W, …], and their gradients [L, …]."""
    leaves = leaves_of(line, own)
    users = len(own["x"])
    given = {
        name: Weights.of(t) if name in OWN else t.flatten(0, 1).as_subclass(Rows)
        for name, t in leaves.items()
    }
    with Lanes(users, calls=calls):
        found = tensors_in(eval(line, names_of() | given))
    assert all(isinstance(each, Rows) and each.axis == 0 for each in found)
    found = [each.as_subclass(Tensor).unflatten(0, (users, -1)) for each in found]
    return [*(each.detach() for each in found), *gradients(found, leaves)]


def one_by_one(line: str, own: Mapping[str, Tensor]) -> list[Tensor]:
    """The same by plain torch, a user at a time."""
    leaves = leaves_of(line, own)
    each = []
    for user in range(len(own["x"])):
        mine = {name: t[user] for name, t in leaves.items()}
        each.append(tensors_in(eval(line, names_of() | mine)))
    found = [torch.stack(of_users) for of_users in zip(*each, strict=True)]
    return [*(one.detach() for one in found), *gradients(found, leaves)]


def assert_alike(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        rough = one.dtype in (torch.float16, torch.bfloat16)
        close = {"rtol": 1e-2, "atol": 1e-2} if rough else {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(one, other, equal_nan=True, **close)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("line", KNOWN)
def test_each_user_gets_what_it_gets_alone(line: str) -> None:
    for own in (of_users(1, 1, 0), of_users(3, 2, 1)):
        assert_alike(side_by_side(line, own), one_by_one(line, own))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("line", KNOWN)
def test_bits_depend_on_neither_neighbours_nor_place(line: str) -> None:
    own, others = of_users(32, 2, 0), of_users(32, 2, 1)
    others["x"][::2], others["z"][1::3] = torch.nan, torch.inf
    enemies = torch.arange(32) % 3 != 0
    moved = {}
    for name, tensor in own.items():
        where = enemies.view(-1, *[1] * (tensor.dim() - 1))
        moved[name] = torch.where(where, others[name], tensor).roll(5, 0)
    before, after = side_by_side(line, own), side_by_side(line, moved)
    for one, other in zip(before, after, strict=True):
        back, exact = other.roll(-5, 0), {"rtol": 0.0, "atol": 0.0, "equal_nan": True}
        torch.testing.assert_close(back[~enemies], one[~enemies], **exact)


def test_every_kind_of_function_in_the_table_is_among_these_lines() -> None:
    calls, own = list[Done](), of_users(2, 2, 0)
    for line in KNOWN:
        side_by_side(line, own, calls)
    simple = (module._public, module._pointwise)
    tables = module._RULES, module._TURNED_RULES
    known = {name for rules in tables for name, rule in rules.items() if rule not in simple}
    called = {call.name for call, _ in calls}
    assert {name for name in known if name.strip("_") not in called} - called == set()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("line", lines_of(MIXING))
def test_what_would_mix_users_is_refused(line: str) -> None:
    with pytest.raises(MixingError):
        side_by_side(line, of_users(4, 2, 0))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("line", lines_of(ELSEWHERE))
def test_what_is_not_refused_is_right(line: str) -> None:
    own = of_users(4, 2, 0)
    try:
        found = side_by_side(line, own)
    except MixingError:
        return
    assert_alike(found, one_by_one(line, own))


@given(st.integers(0, 2**62), st.integers(1, 3), st.sampled_from([0.1, 0.5, 0.9]))
@settings(max_examples=10)
def test_dropout_is_by_each_users_own_word(word: int, rows: int, p: float) -> None:
    def dropped(words: list[int]) -> Tensor:
        x = torch.ones(len(words) * rows, 64).as_subclass(Rows)
        with Lanes(len(words), lambda: torch.tensor(words)):
            both = [functional.dropout(x, p) for _ in range(2)]
        return torch.stack([each.as_subclass(Tensor).unflatten(0, (-1, rows)) for each in both], 1)

    alone, among = dropped([word])[0], dropped([7, word, word + 1])
    assert among[1].equal(alone)
    assert not among[0].equal(alone)
    assert not alone[0].equal(alone[1])
    assert ((alone == 0) | torch.isclose(alone, torch.tensor(1 / (1 - p)))).all()


def test_dropout_drops_as_often_as_asked_and_needs_words() -> None:
    x = torch.ones(4, 20_000).as_subclass(Rows)
    with Lanes(4, lambda: torch.arange(4)):
        zeros = (functional.dropout(x, 0.3) == 0).as_subclass(Tensor).double().mean(1)
    assert ((zeros - 0.3).abs() < 5 * (0.21 / 20_000) ** 0.5).all()
    with Lanes(4), pytest.raises(MixingError, match="no random words"):
        functional.dropout(x, 0.3)
