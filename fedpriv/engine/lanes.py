"""Users side by side: functions of torch that are known to keep users apart.

Under `Lanes`, a model computes with two kinds of tensors. `Rows` are the examples of l users, one
user after another, and all results computed from them row by row. `Weights` are parameters that
each user has separately. A function of torch with such an argument must be in the table at the end,
which defines how it is computed for all users. Any other function raises `MixingError`, and then
users train alone. No rule of the table depends on the content of a row, so a row has no influence
on others.

So for any model, the result for a row is a function of that row and its user's weights, except for
rounding: the instructions that compute a number may depend on its place. `engine.roads` tests that.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedpriv.engine.products import LowRank, Window, convolved, multiplied
from fedpriv.engine.schedule import random_words
from fedpriv.engine.task import cross_entropy
from fedpriv.errors import ModelError

Arguments = tuple[Any, ...]
Options = Mapping[str, Any]


class MixingError(ModelError):
    """A function of torch is not known to keep users apart, so they cannot train side by side."""


class Rows(Tensor):
    """Examples of l users, or results computed from them row by row, [l·W, …].

    If the axes were permuted, the rows are along `axis` instead of the first axis.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    axis = 0


class Weights(Tensor):
    """A parameter [*shape] that each of l users has separately."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    own: Tensor  # [l, *shape]
    learning: LowRank | None  # replaces the weights of a layer that learns without them

    @staticmethod
    def of(own: Tensor) -> "Weights":
        """Wrap the weights of l users, [l, *shape]."""
        # A tensor with the shape of one user's weights, but without their numbers, so functions
        # outside the table cannot use it.
        weights = own.new_zeros(()).expand(own.shape[1:]).as_subclass(Weights)
        weights.own, weights.learning = own, None
        return weights


@dataclass(frozen=True)
class Call:
    """A function of torch and its arguments."""

    function: Callable[..., Any]
    name: str
    args: Arguments
    options: Options

    @property
    def tensors(self) -> Iterator[Tensor]:
        """All tensors among the arguments, and in lists among them."""
        for argument in chain(self.args, self.options.values()):
            if isinstance(argument, Tensor):
                yield argument
            elif isinstance(argument, list | tuple):
                yield from (t for t in argument if isinstance(t, Tensor))

    @property
    def numbers(self) -> list[int]:
        """All arguments except the first, which are numbers or one list of numbers."""
        rest = self.args[1:]
        numbers = rest[0] if len(rest) == 1 and isinstance(rest[0], list | tuple) else rest
        self.need(not self.options and all(type(number) is int for number in numbers))
        return list(numbers)

    def given(self, *names: str) -> list[Any]:
        """Return the arguments with these names, which is also their order; None if absent."""
        by_name = {**dict(zip(names, self.args, strict=False)), **self.options}
        return [by_name.get(name) for name in names]

    def need(self, condition: bool) -> None:  # noqa: FBT001
        """Raise MixingError unless a condition holds under which the call keeps users apart."""
        if not condition:
            raise MixingError(f"{self.name}, used like this, is not known to keep users apart")

    def changed(self, change: Callable[[Any], Any]) -> Any:
        """Return torch's result for changed arguments."""
        by_name = {name: change(value) for name, value in self.options.items()}
        return self.function(*map(change, self.args), **by_name)

    def as_rows(self) -> Any:
        """Return torch's result as rows."""
        return _as_rows(self.function(*self.args, **self.options))


Done = tuple[Call, Any]
"""A call and its result."""


def _as_rows(result: Any) -> Any:
    """Mark tensors, or those of a sequence, as rows along the first axis."""
    if isinstance(result, tuple | list):
        return type(result)([_as_rows(part) for part in result])
    return result.as_subclass(Rows)


_OF_SHAPES = ("aten::new_", "aten::zeros_like", "aten::ones_like", "aten::full_like", "aten::empty")


class Derived(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that tracks all tensors that were computed from some initial ones, in any way."""

    def __init__(self, *tensors: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch would import its compiler

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._storages

    def __torch_dispatch__(
        self,
        function: Any,
        types: Iterable[type],
        args: Arguments = (),
        kwargs: Options | None = None,
    ) -> Any:
        """Torch calls this method for each operation."""
        options = kwargs or {}
        result = function(*args, **options)
        inputs = [t for t in tree_leaves((args, options)) if isinstance(t, Tensor)]
        if any(t in self for t in inputs) and not function._schema.name.startswith(_OF_SHAPES):
            for t in tree_leaves(result):
                if isinstance(t, Tensor):
                    self._storages[t.untyped_storage()._cdata] = t.untyped_storage()
        return result


class Lanes(TorchFunctionMode):
    """A mode in which functions of torch keep l users apart."""

    def __init__(
        self,
        users: int,
        words: Callable[[], Tensor] | None = None,
        calls: "list[Done] | None" = None,
        derived: "Derived | None" = None,
    ) -> None:
        """`words` returns a random word of each user, int64 [l], for masks of dropout.

        All calls with rows and weights are appended to `calls`, if it is given. Other tensors that
        are `derived` from them are refused.
        """
        super().__init__()
        self.users, self._words, self._drawn, self._calls = users, words, 0, calls
        self._derived = derived

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Iterable[type],
        args: Arguments = (),
        kwargs: Options | None = None,
    ) -> Any:
        """Torch calls this method instead of each of its functions."""
        call = Call(function, _name_of(function), args, kwargs or {})
        if not any(isinstance(t, Rows | Weights) for t in call.tensors):
            return function(*args, **call.options)
        if self._derived is not None:
            others = (t for t in call.tensors if not isinstance(t, Rows | Weights))
            call.need(not any(t in self._derived for t in others))
        is_permuted = any(isinstance(t, Rows) and t.axis for t in call.tensors)
        rule = (_TURNED_RULES if is_permuted else _RULES).get(call.name)
        call.need(rule is not None and call.options.get("out") is None)
        result = cast(Rule, rule)(self, call)
        if self._calls is not None:
            self._calls.append((call, result))
        return result

    def mask(self, shape: torch.Size, p: float) -> Tensor:
        """Draw zeros with probability p, rounded to 2⁻³², and 1/(1 − p) elsewhere, [*shape]."""
        if self._words is None:
            raise MixingError("there are no random words for dropout")
        count = shape.numel() // self.users
        bits = random_words(self._words(), self._drawn, -(-count // 2))  # each serves two numbers
        self._drawn += bits.shape[1]
        retained = bits.view(torch.int32)[:, :count] >= round(p * 2.0**32) - 2**31
        return retained.reshape(shape) * (1.0 / (1.0 - p))


def _name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function, without the mark of in-place variants, or of an attribute."""
    name = str(getattr(function, "__name__", function))
    if name == "__get__":
        return str(function.__self__.__name__)  # type: ignore[attr-defined]
    return name if name.endswith("__") else name.rstrip("_")


# A rule computes the result for all users, or raises MixingError if the call may mix users.
Rule = Callable[[Lanes, Call], Any]


def _public(_: Lanes, call: Call) -> Any:
    """Apply the rule for functions that only return shapes and types."""
    return call.function(*call.args, **call.options)


def _pointwise(lanes: Lanes, call: Call) -> Any:
    """Apply the rule for elementwise functions of rows, users' weights and shared tensors."""
    tensors = [*call.tensors]
    rows = [t for t in tensors if isinstance(t, Rows)]
    weights = [t for t in tensors if isinstance(t, Weights)]
    others = [t for t in tensors if not isinstance(t, Rows | Weights)]
    axes = max(t.dim() for t in rows or weights)
    call.need(all(_is_shared(t, axes) for t in others))
    call.need(all(t.dim() == axes for t in rows or weights))
    name = getattr(call.function, "__name__", "")
    if name.startswith("__i") or (name.endswith("_") and not name.endswith("__")):
        call.need(isinstance(call.args[0], Rows))  # which the function overwrites
    if not weights:
        result = call.function(*call.args, **call.options)
        call.need(isinstance(result, Tensor))  # not indices, as from torch.where of one argument
        return _as_rows(result)
    if not rows:
        return Weights.of(call.changed(lambda argument: getattr(argument, "own", argument)))

    def by_user(value: Any) -> Any:
        if isinstance(value, Rows):
            return value.reshape(lanes.users, -1, *value.shape[1:])
        if isinstance(value, Weights):
            return _over_rows(value, axes)
        return value[:1] if isinstance(value, Tensor) and value.dim() == axes else value

    result = call.changed(by_user)
    call.need(result.shape[:2] == by_user(rows[0]).shape[:2])
    return _as_rows(result.flatten(0, 1))


def _is_shared(constant: Tensor, axes: int) -> bool:
    """Return whether a tensor is the same for all rows, which have `axes` axes."""
    if constant.dim() != axes:
        return constant.dim() < axes
    return len(constant) == 1 or constant.stride(0) == 0


def _over_rows(weights: Weights, axes: int) -> Tensor:
    """Return weights in a shape that broadcasts over rows [l, W, …], which have `axes` axes."""
    shape = weights.own.shape[1:]
    if len(shape) == axes and shape[0] == 1:
        shape = shape[1:]
    if len(shape) >= axes:
        raise MixingError("weights with an axis of rows are not known to keep users apart")
    return weights.own.reshape(len(weights.own), *[1] * (axes - len(shape)), *shape)


def _along(place: int = 1, default: int | None = None) -> Rule:
    """Return the rule for functions along axes other than that of rows.

    The axes are the argument at `place`, or `dim`.
    """

    def rule(_: Lanes, call: Call) -> Any:
        tensors = [*call.tensors]
        axes = tensors[0].dim() + (call.name in ("stack", "unsqueeze"))
        dim = call.args[place] if len(call.args) > place else call.options.get("dim", default)
        dims = dim if isinstance(dim, list | tuple) else [dim]
        call.need(len(dims) > 0 and all(type(dim) is int and dim % axes for dim in dims))
        call.need(all(isinstance(t, Rows) and t.dim() == tensors[0].dim() for t in tensors))
        return call.as_rows()

    return rule


def _of_rows(condition: Callable[[Call, Tensor], bool]) -> Rule:
    """Return the rule for functions that torch applies to each row, under a condition."""

    def rule(_: Lanes, call: Call) -> Any:
        (x,) = call.given("input")
        call.need(isinstance(x, Rows) and condition(call, x))
        return call.as_rows()

    return rule


def _outside_last_axes(call: Call, x: Tensor) -> bool:
    """Return whether rows are not along the last two axes, and all tensors are rows."""
    return x.dim() >= 3 and all(isinstance(t, Rows) for t in call.tensors)


def _loss(_: Lanes, call: Call) -> Any:
    """Apply the rule for losses of each row."""
    x, y = call.given("input", "target")
    call.need(isinstance(x, Rows) and isinstance(y, Rows) and x.dim() >= y.dim())
    call.need(not any(isinstance(t, Rows | Weights) for t in [*call.tensors][2:]))
    call.need(call.name in _OF_CLASSES or x.shape == y.shape)
    call.need(call.function is cross_entropy or call.options.get("reduction") == "none")
    call.need(call.options.get("reduce") is None and call.options.get("size_average") is None)
    return call.as_rows()


def _reshaped(_: Lanes, call: Call) -> Any:
    x, shape = call.args[0], call.numbers
    if isinstance(x, Weights):
        return Weights.of(x.own.reshape(len(x.own), *shape))
    result = x.reshape(shape)
    call.need(result.dim() > 0 and len(result) == len(x))
    return _as_rows(result)


def _permuted(_: Lanes, call: Call) -> Any:
    x = call.args[0]
    call.need(isinstance(x, Rows))
    return _turned(call.as_rows(), [dim % x.dim() for dim in call.numbers].index(x.axis))


def _transposed(_: Lanes, call: Call) -> Any:
    x = call.args[0]
    call.need(call.name != "T" or x.dim() <= 2)
    first, second = (dim % x.dim() for dim in call.numbers or (-2, -1))
    if isinstance(x, Weights):
        return Weights.of(x.own.transpose(first + 1, second + 1))
    swapped = {first: second, second: first}
    return _turned(call.as_rows(), swapped.get(x.axis, x.axis))


def _turned(rows: Rows, axis: int) -> Rows:
    rows.axis = axis
    return rows


def _selected(_: Lanes, call: Call) -> Any:
    """Apply the rule for selections along the first axis, when rows are along another axis."""
    x, number = call.args[0], [*call.args[1:], *call.options.values(), 0][0]
    call.need(type(number) is int and (call.name == "__getitem__" or number == 0))
    result = call.as_rows()
    if isinstance(result, tuple):
        return tuple(_turned(part, x.axis - 1) for part in result)
    return _turned(result, x.axis - 1)


def _expanded_as(_: Lanes, call: Call) -> Any:
    x, other = call.args
    call.need(isinstance(other, Rows) and not isinstance(x, Weights))
    call.need(x.dim() == other.dim() if isinstance(x, Rows) else _is_shared(x, other.dim()))
    return call.as_rows()


def _indexed(_: Lanes, call: Call) -> Any:
    x, places = call.args
    places = places if isinstance(places, tuple) else (places,)
    call.need(all(p is None or p is ... or type(p) is int or type(p) is slice for p in places))
    if isinstance(x, Weights):
        return Weights.of(x.own[(slice(None), *places)])
    indexed = sum(p is not None and p is not ... for p in places)
    call.need(places[0] == slice(None) or (places[0] is ... and indexed < x.dim()))
    return call.as_rows()


def _filled(_: Lanes, call: Call) -> Any:
    """Apply the rule for new constant tensors, which are rows if as long as the argument."""
    result, rows = call.function(*call.args, **call.options), len(call.args[0])
    are_rows = isinstance(call.args[0], Rows) and result.dim() and len(result) == rows
    return _as_rows(result) if are_rows else result


def _dropped(lanes: Lanes, call: Call) -> Any:
    x, p, training, _inplace = call.given("input", "p", "training", "inplace")
    p = 0.5 if p is None else p
    call.need(isinstance(x, Rows) and "train" not in call.options)
    if training is False or p == 0.0:
        return x
    return _as_rows(x * lanes.mask(x.shape, p) if p < 1.0 else torch.zeros_like(x))


def _linear(lanes: Lanes, call: Call) -> Any:
    x, weight, bias = call.given("input", "weight", "bias")
    if isinstance(weight, Weights) and weight.learning is not None:
        return _as_rows(weight.learning(x))
    return _multiplied(lanes, call, x, weight, bias)


def _multiplied(
    lanes: Lanes, call: Call, x: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Any:
    """Multiply rows by weights [out, in], and add a bias [out] if any; users may share either."""
    call.need(isinstance(x, Rows) and weight.dim() == 2)
    rows = x.reshape(lanes.users, -1, x.shape[-1])
    if bias is None or isinstance(bias, Weights) == isinstance(weight, Weights):
        y = multiplied(rows, _with_users(weight), None if bias is None else _with_users(bias))
    else:
        y = multiplied(rows, _with_users(weight), None)
        y = y + (_over_rows(bias, 2) if isinstance(bias, Weights) else _with_users(bias))
    return _as_rows(y.view(*x.shape[:-1], -1))


def _with_users(parameter: Tensor) -> Tensor:
    """Return a parameter with an axis of users, which has a stride of 0 if users share it."""
    if isinstance(parameter, Weights):
        return parameter.own
    if isinstance(parameter, Rows):
        raise MixingError("rows in the place of weights are not known to keep users apart")
    return parameter.as_strided((1, *parameter.shape), (0, *parameter.stride()))


def _product(lanes: Lanes, call: Call) -> Any:
    left, right = reversed(call.args) if call.name == "__rmatmul__" else call.args
    if isinstance(left, Rows) and isinstance(right, Rows):
        call.need(left.shape[:-2] == right.shape[:-2] and left.dim() >= 3)
        return call.as_rows()
    call.need(right.dim() == 2)
    transposed = Weights.of(right.own.mT) if isinstance(right, Weights) else right.mT
    return _multiplied(lanes, call, left, transposed)


def _convolved(_: Lanes, call: Call) -> Any:
    """Apply the rule for convolutions of images, and of lines as images of one row."""
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    x, weight, bias, *sizes, groups = call.given(*names)
    axes = weight.dim() - 2
    call.need(isinstance(x, Rows) and x.dim() == axes + 2 and groups in (None, 1))
    call.need(not isinstance(sizes[1], str))
    call.need(bias is None or isinstance(bias, Weights) == isinstance(weight, Weights))

    def both(value: Any, default: int) -> tuple[int, ...]:
        """Return a size for (height, width)."""
        value = default if value is None else value
        values = [*value] if isinstance(value, list | tuple) else [value]
        return (*[default] * (2 - axes), *(values * axes if len(values) == 1 else values))

    window = Window(both(tuple(weight.shape[2:]), 1), *map(both, sizes, (1, 0, 1)))
    images, weights = x, _with_users(weight)
    if axes == 1:
        images, weights = x.unsqueeze(2), weights.unsqueeze(3)
    biases = None if bias is None else _with_users(bias)
    y = convolved(images.permute(0, 2, 3, 1), weights, biases, window).permute(0, 3, 1, 2)
    return _as_rows(y.squeeze(2) if axes == 1 else y)


def _looked_up(lanes: Lanes, call: Call) -> Any:
    names = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq")
    words, weight, padding, max_norm, _, by_frequency, sparse = call.given(*names, "sparse")
    call.need(max_norm is None and not by_frequency and not sparse)
    call.need(not words.is_floating_point() and not isinstance(weight, Rows))
    if not isinstance(weight, Weights):
        return call.as_rows()
    weights = weight.own
    equal = words.dim() > 1 and words.stride(0) == 0
    if equal or not isinstance(words, Rows):  # the same words in all rows, for instance positions
        call.need(padding is None)
        return Weights.of(weights[:, words[:1] if equal else words])
    # Neither of these can reach into another user's weights, unlike an index with offsets.
    places = words.reshape(lanes.users, -1)
    if weights.device.type == "cpu":
        y = weights.gather(1, places.unsqueeze(-1).expand(-1, -1, weights.shape[2]))
    else:  # on a GPU, `gather` would add gradients in a different order each time
        y = weights[torch.arange(lanes.users, device=weights.device)[:, None], places]
    y = y.view(*words.shape, weights.shape[2])
    if padding is not None:
        y = torch.where((words == padding % weights.shape[1])[..., None], y.detach(), y)
    return _as_rows(y)


def _normalised(*parameters: str) -> Rule:
    """Return the rule for normalisations of each row, with weight and bias if there are any."""

    def rule(lanes: Lanes, call: Call) -> Any:
        x, _, *affine = call.given("input", "shape", *parameters)
        call.need(isinstance(x, Rows) and x.dim() >= 2)
        call.need(call.name == "group_norm" or len(call.given("input", "shape")[1]) < x.dim())
        y = call.changed(lambda value: None if any(value is p for p in affine) else value)
        for parameter, name in zip(affine, ("mul", "add"), strict=False):
            if parameter is not None:
                if call.name == "group_norm":
                    parameter = _channels(parameter, x.dim())  # noqa: PLW2901
                operands = _as_rows(y), parameter
                y = _pointwise(lanes, Call(getattr(torch, name), name, operands, {}))
        return _as_rows(y)

    return rule


def _channels(parameter: Tensor, axes: int) -> Tensor:
    """Return a parameter [channels] in a shape that broadcasts over rows [l·W, channels, …]."""
    shape = (-1, *[1] * (axes - 2))
    if isinstance(parameter, Weights):
        return Weights.of(parameter.own.reshape(len(parameter.own), *shape))
    return _with_users(parameter)[0].reshape(shape)


def _rectified(lanes: Lanes, call: Call) -> Any:
    x, weight = call.given("input", "weight")
    call.need(isinstance(x, Rows) and x.dim() >= 2)
    slopes = weight if weight.numel() == 1 else _channels(weight, x.dim())
    negative_part = _pointwise(lanes, Call(torch.mul, "mul", (x, slopes), {}))
    return _as_rows(torch.where(x > 0, x, negative_part))


def _attention(_: Lanes, call: Call) -> Any:
    query, key, value, mask, p = call.given("query", "key", "value", "attn_mask", "dropout_p")
    axes = query.dim()
    call.need(axes >= 3 and not p)
    call.need(all(isinstance(t, Rows) and t.dim() == axes for t in (query, key, value)))
    if isinstance(mask, Rows):
        call.need(mask.dim() == axes)
    elif mask is not None:
        call.need(not isinstance(mask, Weights) and _is_shared(mask, axes))
    return call.as_rows()


_OF_CLASSES = ("cross_entropy", "nll_loss")
_ELEMENTWISE = """
    abs absolute acos add addcdiv addcmul asin atan atan2 bitwise_and bitwise_not bitwise_or
    bitwise_xor bool ceil celu clamp clamp_max clamp_min clip clone contiguous copysign cos cosh
    data detach div divide double elu eq erf erfc erfinv exp exp2 expm1 float floor floor_divide
    fmod frac ge gelu greater gt half hardshrink hardsigmoid hardswish hardtanh heaviside int
    isfinite isinf isnan le leaky_relu lerp less lgamma log log10 log1p log2 logaddexp
    logical_and logical_not logical_or logical_xor logit log_sigmoid long lt masked_fill maximum
    minimum mish mul multiply nan_to_num ne neg negative ones_like pow positive reciprocal relu
    relu6 remainder round rsqrt selu sigmoid sign silu sin sinc sinh softplus softshrink
    softsign sqrt square sub subtract tan tanh tanhshrink threshold _threshold to true_divide
    trunc type_as where xlogy zeros_like full_like bfloat16 __abs__ __and__ __eq__ __ge__ __gt__
    __invert__ __le__ __lt__ __ne__ __neg__ __or__ __pos__ __radd__ __rand__ __rdiv__
    __rfloordiv__ __rmod__ __rmul__ __ror__ __rpow__ __rsub__ __rtruediv__ __rxor__ __xor__
    __iadd__ __isub__ __imul__ __itruediv__ __idiv__ __add__ __sub__ __mul__ __truediv__ __div__
    __floordiv__ __mod__ __pow__
"""
_ROUNDED_DIFFERENTLY = """
    acos asin atan atan2 celu cos cosh elu erf erfc erfinv exp exp2 expm1 gelu lgamma log log10
    log1p log2 logaddexp logit log_sigmoid mish pow selu sigmoid silu sin sinc sinh softplus tan
    tanh tanhshrink xlogy __pow__ __rpow__
"""
ROUNDED = frozenset(_ROUNDED_DIFFERENTLY.split())
"""Elementwise functions whose rounding depends on the instructions that compute them."""
_SHAPES_AND_TYPES = """
    shape size dim ndim ndimension numel nelement dtype device layout requires_grad is_leaf is_cuda
    is_floating_point is_complex is_sparse is_quantized is_contiguous element_size stride itemsize
    __len__ is_nested
"""
_ALONG_ONE = """
    all amax amin any argmax argmin argsort cumprod cumsum logcumsumexp log_softmax logsumexp
    max mean median min narrow prod select softmax softmin sort squeeze std sum unbind unsqueeze
    var
"""
_POOLS = [
    f"{way}{kind}_pool{n}d"
    for way in ("", "adaptive_")
    for kind in ("max", "avg")
    for n in (1, 2, 3)
]
_RULES: Mapping[str, Rule] = {
    **dict.fromkeys(_ELEMENTWISE.split(), _pointwise),
    **dict.fromkeys(_SHAPES_AND_TYPES.split(), _public),
    **dict.fromkeys(_ALONG_ONE.split(), _along()),
    "flip": _of_rows(lambda call, x: all(dim % x.dim() for dim in call.numbers)),
    **dict.fromkeys(("cat", "concat", "concatenate", "stack"), _along(default=0)),
    **dict.fromkeys(("chunk", "split", "tensor_split", "topk"), _along(2, 0)),
    **dict.fromkeys(("norm", "cosine_similarity"), _along(2)),
    "normalize": _along(2, 1),
    "glu": _along(default=-1),
    "unfold": _along(),
    **dict.fromkeys(("view", "reshape"), _reshaped),
    "flatten": _of_rows(lambda call, x: (call.given("input", "start_dim")[1] or 0) % x.dim() > 0),
    "permute": _permuted,
    **dict.fromkeys(("transpose", "swapaxes", "swapdims", "t", "T", "mT"), _transposed),
    "expand": _of_rows(
        lambda call, x: len(call.numbers) == x.dim() and call.numbers[0] in (-1, len(x))
    ),
    "expand_as": _expanded_as,
    "__getitem__": _indexed,
    **dict.fromkeys(("new_zeros", "new_ones", "new_full"), _filled),
    "pad": _of_rows(
        lambda call, x: (
            len(call.given("input", "pad")[1]) < 2 * x.dim() and len([*call.tensors]) == 1
        )
    ),
    "one_hot": _of_rows(lambda call, _: (call.given("input", "num_classes")[1] or 0) > 0),
    **dict.fromkeys(("tril", "triu", *_POOLS), _of_rows(_outside_last_axes)),
    "dropout": _dropped,
    "linear": _linear,
    **dict.fromkeys(("matmul", "mm", "bmm", "__matmul__", "__rmatmul__"), _product),
    **dict.fromkeys(("conv1d", "conv2d"), _convolved),
    "embedding": _looked_up,
    **dict.fromkeys(("layer_norm", "group_norm"), _normalised("weight", "bias")),
    "rms_norm": _normalised("weight"),
    "prelu": _rectified,
    "scaled_dot_product_attention": _attention,
    **{f"{kind}_loss": _loss for kind in ("nll", "mse", "l1", "smooth_l1", "huber")},
    **{f"binary_cross_entropy{kind}": _loss for kind in ("", "_with_logits")},
    "cross_entropy": _loss,
}
_TURNED_RULES: Mapping[str, Rule] = {
    **dict.fromkeys(_SHAPES_AND_TYPES.split(), _public),
    "permute": _permuted,
    **dict.fromkeys(("transpose", "swapaxes", "swapdims"), _transposed),
    **dict.fromkeys(("unbind", "__getitem__"), _selected),
}
"""Rules for rows along an axis other than the first."""
