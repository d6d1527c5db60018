"""Users side by side: functions of torch, each known to keep them apart.

Under `Lanes` a model computes with two kinds of tensors. `Rows` are the examples of l users, one
user after another, and what is computed from them row by row. `Weights` are parameters of which
each user has its own. A function of torch that is given one of them must be in the table at the
end, which says how it is done for all users. Any other raises a `MixingError`, and then users train
alone. Nothing in the table looks at what a row holds, so a row decides nothing for others.

So what becomes of a row is a function of that row and of its user's weights, whatever the model
does. Only rounding is left: which instructions compute a number may depend on its place, which
`engine.roads` tries.
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

from fedpriv.engine.products import LowRank, Window, convolved, multiplied, paired
from fedpriv.engine.schedule import random_words
from fedpriv.errors import ModelError

Arguments = tuple[Any, ...]
Options = Mapping[str, Any]


class MixingError(ModelError):
    """A function of torch is not known to keep users apart, so that they cannot go side by side."""


class Rows(Tensor):
    """What is computed row by row from examples of l users, [l·W, …].

    Where its axes were permuted, the rows are along another axis than the first, `axis`.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    axis = 0


class Weights(Tensor):
    """A parameter [*shape] of which each of l users has its own."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    own: Tensor  # [l, *shape]
    learning: LowRank | None  # what is in the place of a layer's weights, if it has none

    @staticmethod
    def of(own: Tensor) -> "Weights":
        """The weights of users, [l, *shape]."""
        # Of the shape of one user's, and of no use to functions that do not know them.
        weights = own.new_zeros(()).expand(own.shape[1:]).as_subclass(Weights)
        weights.own, weights.learning = own, None
        return weights


@dataclass(frozen=True)
class Call:
    """A function of torch and what it is given."""

    function: Callable[..., Any]
    name: str
    args: Arguments
    options: Options

    @property
    def tensors(self) -> Iterator[Tensor]:
        """All tensors among the arguments, and in lists among them."""
        for each in chain(self.args, self.options.values()):
            if isinstance(each, Tensor):
                yield each
            elif isinstance(each, list | tuple):
                yield from (t for t in each if isinstance(t, Tensor))

    @property
    def numbers(self) -> list[int]:
        """All arguments but the first, as numbers or as one list of them."""
        rest = self.args[1:]
        numbers = rest[0] if len(rest) == 1 and isinstance(rest[0], list | tuple) else rest
        self.need(not self.options and all(type(number) is int for number in numbers))
        return list(numbers)

    def given(self, *names: str) -> list[Any]:
        """Arguments by name, of which the first may stand in this order; None if absent."""
        named = {**dict(zip(names, self.args, strict=False)), **self.options}
        return [named.get(name) for name in names]

    def need(self, known: bool) -> None:  # noqa: FBT001
        """Raise MixingError unless the function is known to keep users apart as it is called."""
        if not known:
            raise MixingError(f"{self.name}, used like this, is not known to keep users apart")

    def changed(self, change: Callable[[Any], Any]) -> Any:
        """What torch gives for other arguments."""
        named = {name: change(value) for name, value in self.options.items()}
        return self.function(*map(change, self.args), **named)

    def as_rows(self) -> Any:
        """What torch gives, as rows."""
        return _as_rows(self.function(*self.args, **self.options))


@dataclass(frozen=True)
class Done:
    """A call and what it gave."""

    call: Call
    found: Any


def _as_rows(found: Any) -> Any:
    """Tensors of which each entry of the first axis is of that row."""
    if isinstance(found, tuple | list):
        return type(found)([_as_rows(each) for each in found])
    return found.as_subclass(Rows)


_OF_SHAPES = ("aten::new_", "aten::zeros_like", "aten::ones_like", "aten::full_like", "aten::empty")


class Derived(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that knows what was computed from some tensors, in whatever way."""

    def __init__(self, *tensors: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # or torch would import its compiler
        return False

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._storages

    def __torch_dispatch__(
        self,
        function: Any,
        types: Iterable[type],
        args: Arguments = (),
        kwargs: Options | None = None,
    ) -> Any:
        """What torch calls for each operation."""
        found, options = function(*args, **(kwargs or {})), kwargs or {}
        given = [t for t in tree_leaves((args, options)) if isinstance(t, Tensor)]
        if any(t in self for t in given) and not function._schema.name.startswith(_OF_SHAPES):
            for t in tree_leaves(found):
                if isinstance(t, Tensor):
                    self._storages[t.untyped_storage()._cdata] = t.untyped_storage()
        return found


class Lanes(TorchFunctionMode):
    """A mode in which functions of torch keep l users apart."""

    def __init__(
        self,
        users: int,
        words: Callable[[], Tensor] | None = None,
        calls: "list[Done] | None" = None,
        derived: "Derived | None" = None,
    ) -> None:
        """`words` gives a random word of each user, int64 [l]: masks of dropout follow from it.

        All that is done with rows and weights is appended to `calls`, if it is given. Other tensors
        that are `derived` from them are refused.
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
        """What torch calls in place of each of its functions."""
        call = Call(function, _name_of(function), args, kwargs or {})
        if not any(isinstance(t, Rows | Weights) for t in call.tensors):
            return function(*args, **call.options)
        if self._derived is not None:
            others = (t for t in call.tensors if not isinstance(t, Rows | Weights))
            call.need(not any(t in self._derived for t in others))
        turned = any(isinstance(t, Rows) and t.axis for t in call.tensors)
        rule = (_TURNED_RULES if turned else _RULES).get(call.name)
        call.need(rule is not None and call.options.get("out") is None)
        found = cast(Rule, rule)(self, call)
        if self._calls is not None:
            self._calls.append(Done(call, found))
        return found

    def mask(self, shape: torch.Size, p: float) -> Tensor:
        """Zeros with probability p, rounded to 2⁻³², and 1/(1 − p) elsewhere, by users' words."""
        if self._words is None:
            raise MixingError("there are no random words for dropout")
        count = shape.numel() // self.users
        bits = random_words(self._words(), self._drawn, -(-count // 2))  # of two numbers each
        self._drawn += bits.shape[1]
        kept = bits.view(torch.int32)[:, :count] >= round(p * 2.0**32) - 2**31
        return kept.reshape(shape) * (1.0 / (1.0 - p))


def _name_of(function: Callable[..., Any]) -> str:
    """Name of a function, whether it writes to its argument or not; of an attribute, its own."""
    name = str(getattr(function, "__name__", function))
    if name == "__get__":
        return str(function.__self__.__name__)  # type: ignore[attr-defined]
    return name if name.endswith("__") else name.rstrip("_")


# Rules: what is done for all users, if the function, as it is called, does it with each by itself.
Rule = Callable[[Lanes, Call], Any]


def _public(_: Lanes, call: Call) -> Any:
    """Shapes and types."""
    return call.function(*call.args, **call.options)


def _pointwise(lanes: Lanes, call: Call) -> Any:
    """Number by number: rows with rows, with users' weights, and with what all rows share."""
    tensors = [*call.tensors]
    rows = [t for t in tensors if isinstance(t, Rows)]
    weights = [t for t in tensors if isinstance(t, Weights)]
    others = [t for t in tensors if not isinstance(t, Rows | Weights)]
    axes = max(t.dim() for t in rows or weights)
    call.need(all(_is_shared(t, axes) for t in others))
    call.need(all(t.dim() == axes for t in rows or weights))
    name = getattr(call.function, "__name__", "")
    if name.startswith("__i") or (name.endswith("_") and not name.endswith("__")):
        call.need(isinstance(call.args[0], Rows))  # it writes to it
    if not weights:
        found = call.function(*call.args, **call.options)
        call.need(isinstance(found, Tensor))  # and no places, as of torch.where with one argument
        return _as_rows(found)
    if not rows:
        return Weights.of(call.changed(lambda each: getattr(each, "own", each)))

    def by_user(value: Any) -> Any:
        if isinstance(value, Rows):
            return value.reshape(lanes.users, -1, *value.shape[1:])
        if isinstance(value, Weights):
            return _over_rows(value, axes)
        return value[:1] if isinstance(value, Tensor) and value.dim() == axes else value

    found = call.changed(by_user)
    call.need(found.shape[:2] == by_user(rows[0]).shape[:2])
    return _as_rows(found.flatten(0, 1))


def _is_shared(constant: Tensor, axes: int) -> bool:
    """Whether all rows, which have so many axes, meet the same numbers."""
    if constant.dim() != axes:
        return constant.dim() < axes
    return len(constant) == 1 or constant.stride(0) == 0


def _over_rows(weights: Weights, axes: int) -> Tensor:
    """Weights as what is broadcast over rows of so many axes, [l, W, …]."""
    shape = weights.own.shape[1:]
    if len(shape) == axes and shape[0] == 1:
        shape = shape[1:]
    if len(shape) >= axes:
        raise MixingError("weights with an axis of rows are not known to keep users apart")
    return weights.own.reshape(len(weights.own), *[1] * (axes - len(shape)), *shape)


def _along(place: int = 1, default: int | None = None) -> Rule:
    """Along axes, none of them that of rows; they are the argument at a place, or `dim`."""

    def rule(_: Lanes, call: Call) -> Any:
        tensors = [*call.tensors]
        axes = tensors[0].dim() + (call.name in ("stack", "unsqueeze"))
        named = call.args[place] if len(call.args) > place else call.options.get("dim", default)
        dims = named if isinstance(named, list | tuple) else [named]
        call.need(len(dims) > 0 and all(type(dim) is int and dim % axes for dim in dims))
        call.need(all(isinstance(t, Rows) and t.dim() == tensors[0].dim() for t in tensors))
        return call.as_rows()

    return rule


def _flipped(_: Lanes, call: Call) -> Any:
    x, dims = call.args[0], call.numbers
    call.need(isinstance(x, Rows) and all(dim % x.dim() for dim in dims))
    return call.as_rows()


def _each_row(axes: int) -> Rule:
    """What torch does with each row by itself, if it has so many axes with that of rows."""

    def rule(_: Lanes, call: Call) -> Any:
        x = call.args[0]
        call.need(isinstance(x, Rows) and x.dim() >= axes)
        call.need(all(isinstance(t, Rows) for t in call.tensors))
        return call.as_rows()

    return rule


def _loss(_: Lanes, call: Call) -> Any:
    """A loss of each row."""
    x, y = call.given("input", "target")
    call.need(isinstance(x, Rows) and isinstance(y, Rows) and x.dim() >= y.dim())
    call.need(not any(isinstance(t, Rows | Weights) for t in [*call.tensors][2:]))
    call.need(call.name in _OF_CLASSES or x.shape == y.shape)
    call.need(call.options.get("reduction") == "none")
    call.need(call.options.get("reduce") is None and call.options.get("size_average") is None)
    return call.as_rows()


def _reshaped(_: Lanes, call: Call) -> Any:
    x, shape = call.args[0], call.numbers
    if isinstance(x, Weights):
        return Weights.of(x.own.reshape(len(x.own), *shape))
    found = x.reshape(shape)
    call.need(found.dim() > 0 and len(found) == len(x))
    return _as_rows(found)


def _flattened(_: Lanes, call: Call) -> Any:
    x, start, _end = call.given("input", "start_dim", "end_dim")
    call.need(isinstance(x, Rows) and (start or 0) % x.dim() > 0)
    return call.as_rows()


def _permuted(_: Lanes, call: Call) -> Any:
    x = call.args[0]
    call.need(isinstance(x, Rows))
    return _turned(call.as_rows(), [dim % x.dim() for dim in call.numbers].index(x.axis))


def _transposed(_: Lanes, call: Call) -> Any:
    x = call.args[0]
    call.need(call.name != "T" or x.dim() <= 2)
    one, other = (dim % x.dim() for dim in call.numbers or (-2, -1))
    if isinstance(x, Weights):
        return Weights.of(x.own.transpose(one + 1, other + 1))
    swapped = {one: other, other: one}
    return _turned(call.as_rows(), swapped.get(x.axis, x.axis))


def _turned(rows: Rows, axis: int) -> Rows:
    rows.axis = axis
    return rows


def _taken_apart(_: Lanes, call: Call) -> Any:
    """Parts along the first axis of rows that are along another."""
    x, number = call.args[0], [*call.args[1:], *call.options.values(), 0][0]
    call.need(type(number) is int and (call.name == "__getitem__" or number == 0))
    found = call.as_rows()
    parts = [_turned(part, x.axis - 1) for part in (found if isinstance(found, tuple) else [found])]
    return tuple(parts) if isinstance(found, tuple) else parts[0]


def _expanded(_: Lanes, call: Call) -> Any:
    x, shape = call.args[0], call.numbers
    call.need(isinstance(x, Rows) and len(shape) == x.dim() and shape[0] in (-1, len(x)))
    return call.as_rows()


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
    taken = sum(p is not None and p is not ... for p in places)
    call.need(places[0] == slice(None) or (places[0] is ... and taken < x.dim()))
    return call.as_rows()


def _filled(_: Lanes, call: Call) -> Any:
    """A new tensor of one number, of rows if its first axis is as long as that of the rows."""
    made, rows = call.function(*call.args, **call.options), len(call.args[0])
    of_rows = isinstance(call.args[0], Rows) and made.dim() and len(made) == rows
    return _as_rows(made) if of_rows else made


def _padded(_: Lanes, call: Call) -> Any:
    x, sizes = call.given("input", "pad")
    call.need(isinstance(x, Rows) and len(sizes) <= 2 * (x.dim() - 1))
    call.need(len([*call.tensors]) == 1)
    return call.as_rows()


def _one_hot(_: Lanes, call: Call) -> Any:
    x, classes = call.given("input", "num_classes")
    call.need(isinstance(x, Rows) and classes is not None and classes > 0)
    return call.as_rows()


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
    """Rows times weights [out, in], with a bias [out] or without; users may share either."""
    call.need(isinstance(x, Rows) and weight.dim() == 2)
    rows = x.reshape(lanes.users, -1, x.shape[-1])
    if bias is None or isinstance(bias, Weights) == isinstance(weight, Weights):
        y = multiplied(rows, _of_users(weight), None if bias is None else _of_users(bias))
    else:
        y = multiplied(rows, _of_users(weight), None)
        y = y + (_over_rows(bias, 2) if isinstance(bias, Weights) else _of_users(bias))
    return _as_rows(y.view(*x.shape[:-1], -1))


def _of_users(parameter: Tensor) -> Tensor:
    """A parameter with an axis of users; one that they share has a stride of 0 there."""
    if isinstance(parameter, Weights):
        return parameter.own
    if isinstance(parameter, Rows):
        raise MixingError("rows in the place of weights are not known to keep users apart")
    return parameter.as_strided((1, *parameter.shape), (0, *parameter.stride()))


def _product(lanes: Lanes, call: Call) -> Any:
    left, right = reversed(call.args) if call.name == "__rmatmul__" else call.args
    if isinstance(left, Rows) and isinstance(right, Rows):
        call.need(left.shape[:-2] == right.shape[:-2] and left.dim() >= 3)
        return _as_rows(paired(left, right))
    call.need(right.dim() == 2)
    turned = Weights.of(right.own.mT) if isinstance(right, Weights) else right.mT
    return _multiplied(lanes, call, left, turned)


def _window_of(call: Call) -> Window:
    """What a convolution of images, or of lines, looks at; MixingError if it is of another kind."""
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    x, weight, _, *sizes, groups = call.given(*names)
    axes = weight.dim() - 2
    call.need(isinstance(x, Rows) and x.dim() == axes + 2 and groups in (None, 1))
    call.need(not isinstance(sizes[1], str))

    def both(given: Any, default: int) -> tuple[int, ...]:
        given = default if given is None else given
        each = [*given] if isinstance(given, list | tuple) else [given]
        return (*[default] * (2 - axes), *(each * axes if len(each) == 1 else each))

    kernel = (1,) * (2 - axes) + tuple(weight.shape[2:])
    stride, padding, dilation = map(both, sizes, (1, 0, 1))
    return Window(kernel, stride, padding, dilation)


def _convolved(_: Lanes, call: Call) -> Any:
    x, weight, bias = call.given("input", "weight", "bias")
    window, lines = _window_of(call), weight.dim() == 3
    call.need(bias is None or isinstance(bias, Weights) == isinstance(weight, Weights))
    images, own = x, _of_users(weight)
    if lines:
        images, own = x.unsqueeze(2), own.unsqueeze(3)
    biases = None if bias is None else _of_users(bias)
    y = convolved(images.permute(0, 2, 3, 1), own, biases, window).permute(0, 3, 1, 2)
    return _as_rows(y.squeeze(2) if lines else y)


def _looked_up(lanes: Lanes, call: Call) -> Any:
    names = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq")
    words, weight, padding, most, _, by_frequency, sparse = call.given(*names, "sparse")
    call.need(most is None and not by_frequency and not sparse)
    call.need(not words.is_floating_point() and not isinstance(weight, Rows))
    if not isinstance(weight, Weights):
        return call.as_rows()
    own = weight.own
    alike = words.dim() > 1 and words.stride(0) == 0
    if alike or not isinstance(words, Rows):  # places, which are the same in all rows
        call.need(padding is None)
        return Weights.of(own[:, words[:1] if alike else words])
    # Unlike sums of offsets and numbers, neither way reaches into another user's slice.
    places = words.reshape(lanes.users, -1)
    if own.device.type == "cpu":
        y = own.gather(1, places.unsqueeze(-1).expand(-1, -1, own.shape[2]))
    else:  # a GPU would add up gradients of that in another order each time
        y = own[torch.arange(lanes.users, device=own.device)[:, None], places]
    y = y.view(*words.shape, own.shape[2])
    if padding is not None:
        y = torch.where((words == padding % own.shape[1])[..., None], y.detach(), y)
    return _as_rows(y)


def _normalised(*parameters: str) -> Rule:
    """A normalisation of each row, then weight and bias, or what there is of them."""

    def rule(lanes: Lanes, call: Call) -> Any:
        x, _, *affine = call.given("input", "shape", *parameters)
        call.need(isinstance(x, Rows) and x.dim() >= 2)
        call.need(call.name == "group_norm" or len(call.given("input", "shape")[1]) < x.dim())
        y = call.changed(lambda each: None if any(each is p for p in affine) else each)
        for parameter, name in zip(affine, ("mul", "add"), strict=False):
            if parameter is not None:
                if call.name == "group_norm":
                    parameter = _channels(parameter, x.dim())  # noqa: PLW2901
                given = _as_rows(y), parameter
                y = _pointwise(lanes, Call(getattr(torch, name), name, given, {}))
        return _as_rows(y)

    return rule


def _channels(parameter: Tensor, axes: int) -> Tensor:
    """A parameter [channels] as it is broadcast over rows whose second axis is of channels."""
    shape = (-1, *[1] * (axes - 2))
    if isinstance(parameter, Weights):
        return Weights.of(parameter.own.reshape(len(parameter.own), *shape))
    return _of_users(parameter)[0].reshape(shape)


def _rectified(lanes: Lanes, call: Call) -> Any:
    x, weight = call.given("input", "weight")
    call.need(isinstance(x, Rows) and x.dim() >= 2)
    slopes = weight if weight.numel() == 1 else _channels(weight, x.dim())
    below = _pointwise(lanes, Call(torch.mul, "mul", (x, slopes), {}))
    return _as_rows(torch.where(x > 0, x, below))


def _attended(_: Lanes, call: Call) -> Any:
    query, key, value, mask, p = call.given("query", "key", "value", "attn_mask", "dropout_p")
    axes = query.dim()
    call.need(axes >= 3 and not p)
    call.need(all(isinstance(t, Rows) and t.dim() == axes for t in (query, key, value)))
    if isinstance(mask, Rows):
        call.need(mask.dim() == axes)
    elif mask is not None:
        call.need(not isinstance(mask, Weights) and _is_shared(mask, axes))
    return call.as_rows()


_OF_CLASSES = ("cross_entropy", "class_losses", "nll_loss")
_NUMBER_BY_NUMBER = """
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
_ROUNDED_OTHERWISE = """
    acos asin atan atan2 celu cos cosh elu erf erfc erfinv exp exp2 expm1 gelu lgamma log log10
    log1p log2 logaddexp logit log_sigmoid mish pow selu sigmoid silu sin sinc sinh softplus tan
    tanh tanhshrink xlogy __pow__ __rpow__
"""
ROUNDED = frozenset(_ROUNDED_OTHERWISE.split())
"""Functions of numbers that are rounded in one way or another by different instructions."""
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
_RULES: Mapping[str, Rule] = {
    **dict.fromkeys(_NUMBER_BY_NUMBER.split(), _pointwise),
    **dict.fromkeys(_SHAPES_AND_TYPES.split(), _public),
    **dict.fromkeys(_ALONG_ONE.split(), _along()),
    "flip": _flipped,
    **dict.fromkeys(("cat", "concat", "concatenate", "stack"), _along(default=0)),
    **dict.fromkeys(("chunk", "split", "tensor_split", "topk"), _along(2, 0)),
    **dict.fromkeys(("norm", "cosine_similarity"), _along(2)),
    "normalize": _along(2, 1),
    "glu": _along(default=-1),
    "unfold": _along(),
    **dict.fromkeys(("view", "reshape"), _reshaped),
    "flatten": _flattened,
    "permute": _permuted,
    **dict.fromkeys(("transpose", "swapaxes", "swapdims", "t", "T", "mT"), _transposed),
    "expand": _expanded,
    "expand_as": _expanded_as,
    "__getitem__": _indexed,
    **dict.fromkeys(("new_zeros", "new_ones", "new_full"), _filled),
    "pad": _padded,
    "one_hot": _one_hot,
    **dict.fromkeys(("tril", "triu"), _each_row(3)),
    **{f"{kind}_pool{n}d": _each_row(3) for kind in ("max", "avg") for n in (1, 2, 3)},
    **{f"adaptive_{kind}_pool{n}d": _each_row(3) for kind in ("max", "avg") for n in (1, 2, 3)},
    "dropout": _dropped,
    "linear": _linear,
    **dict.fromkeys(("matmul", "mm", "bmm", "__matmul__", "__rmatmul__"), _product),
    **dict.fromkeys(("conv1d", "conv2d"), _convolved),
    "embedding": _looked_up,
    **dict.fromkeys(("layer_norm", "group_norm"), _normalised("weight", "bias")),
    "rms_norm": _normalised("weight"),
    "prelu": _rectified,
    "scaled_dot_product_attention": _attended,
    **{f"{kind}_loss": _loss for kind in ("nll", "mse", "l1", "smooth_l1", "huber")},
    **{f"binary_cross_entropy{kind}": _loss for kind in ("", "_with_logits")},
    **dict.fromkeys(("cross_entropy", "class_losses"), _loss),
}
_TURNED_RULES: Mapping[str, Rule] = {
    **dict.fromkeys(_SHAPES_AND_TYPES.split(), _public),
    "permute": _permuted,
    **dict.fromkeys(("transpose", "swapaxes", "swapdims"), _transposed),
    **dict.fromkeys(("unbind", "__getitem__"), _taken_apart),
}
"""Rules for rows that are along another axis than the first."""
