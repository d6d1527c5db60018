"""Low-rank adapters (Hu et al. 2021, "LoRA", arXiv:2106.09685), which train few numbers per layer.

A frozen layer with weights W [out, in] is corrected by a trained product of two small matrices,

    y = W x + b + (alpha/r)·B A x,    A [r, in] random, B [out, r] zero at first,

so r·(in + out) numbers are sent, clipped and noised instead of in·out. A and B are ordinary
parameters, `lora_A.weight` and `lora_B.weight` of their layer.
"""

import copy
import math
from collections.abc import Iterable

from torch import Tensor, nn

from fedpriv.engine.arithmetic import generators_apart
from fedpriv.engine.leftovers import lazy_clones
from fedpriv.engine.task import matching
from fedpriv.errors import ModelError
from fedpriv.support.checks import check_seed, check_types, is_whole, plain_numbers


class Adapted(nn.Module):
    """A layer and its adapter: `base`, a `torch.nn.Linear` or `torch.nn.Embedding`, and a product.

    Attributes:
        base: the original layer; its parameters have their old names below `base`.
        lora_A: maps inputs, or words, to r numbers.
        lora_B: maps these to the layer's outputs, without bias.
        scale: alpha/r.
    """

    def __init__(self, base: nn.Linear | nn.Embedding, rank: int, alpha: float) -> None:
        super().__init__()
        self.base, self.scale = base, alpha / rank
        self.lora_A: nn.Linear | nn.Embedding
        if isinstance(base, nn.Linear):
            self.lora_A, outputs = nn.Linear(base.in_features, rank, bias=False), base.out_features
        else:
            self.lora_A = nn.Embedding(base.num_embeddings, rank, base.padding_idx)
            outputs = base.embedding_dim
        self.lora_B = nn.Linear(rank, outputs, bias=False)
        nn.init.zeros_(self.lora_B.weight)
        for part in (self.lora_A, self.lora_B):
            part.to(base.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Map inputs [B, …, in], or words [B, …], to outputs [B, …, out]."""
        # Scaling the narrow tensor, and adding in place, saves memory traffic.
        outputs: Tensor = self.lora_B(self.scale * self.lora_A(x))
        outputs += self.base(x)
        return outputs

    @property
    def weight(self) -> Tensor:
        """Weights of an equivalent layer without adapter, of the same shape as the base's."""
        a, b = self.lora_A.weight, self.lora_B.weight
        change = b @ a if isinstance(self.base, nn.Linear) else a @ b.mT
        return self.base.weight + self.scale * change

    @property
    def bias(self) -> Tensor | None:
        """Bias of the base."""
        return self.base.bias if isinstance(self.base, nn.Linear) else None


def with_adapters(
    model: nn.Module,
    rank: int,
    alpha: float | None = None,
    layers: Iterable[str] = ("*",),
    *,
    seed: int = 0,
) -> nn.Module:
    """Return a copy of a model with `Adapted` layers, in which only adapters require gradients.

    It computes the same outputs. To train other parameters too, such as those of a head, name them
    in the task: `Task(trained=["*lora_*", "head.*"])`.

    >>> model = with_adapters(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3)), 2, layers=["0"])
    >>> [name for name, p in model.named_parameters() if p.requires_grad]
    ['0.lora_A.weight', '0.lora_B.weight']

    Args:
        model: is not changed.
        rank: r, from 1 to the largest rank that the weights of one of the layers can have.
        alpha: positive; by default r, so that the product is not scaled.
        layers: names, or patterns, of layers of type `torch.nn.Linear` and `torch.nn.Embedding`; by
            default all. An embedding must have no `max_norm`.
        seed: draws the matrices A, which are public; from 0 to 2⁶⁴ − 1.

    Raises:
        ModelError: rank or alpha is out of range, a pattern matches no such layer, or the model has
            adapters already.
    """
    rank, alpha, seed = plain_numbers((rank, alpha, seed))
    check_types(model=(model, nn.Module), layers=(layers, str | Iterable))
    check_seed(seed)
    if not is_whole(rank):
        raise ModelError(f"the rank of adapters is {rank!r}; it must be a whole number from 1")
    alpha = float(rank) if alpha is None else alpha
    if not (isinstance(alpha, int | float) and 0.0 < alpha < math.inf):
        raise ModelError(f"alpha of adapters is {alpha!r}; it must be positive and finite")
    if any(isinstance(layer, Adapted) for layer in model.modules()):
        raise ModelError("the model has adapters already; merge_adapters puts them into its layers")
    # No subclasses, since their `forward` may use the weights differently.
    adaptable = {
        name: layer
        for name, layer in model.named_modules()
        if type(layer) is nn.Linear or (type(layer) is nn.Embedding and layer.max_norm is None)
    }
    names = matching(layers, adaptable, "linear layer or embedding")
    largest = max((min(adaptable[name].weight.shape) for name in names), default=0)
    if rank > largest:
        raise ModelError(f"the rank of adapters is {rank}; the largest of {[*names]} is {largest}")
    memo = lazy_clones(model)
    with generators_apart(seed):
        for name in names:
            base = copy.deepcopy(adaptable[name], memo)
            memo[id(adaptable[name])] = Adapted(base, rank, alpha)
    adapted = copy.deepcopy(model, memo)
    for name, parameter in adapted.named_parameters():
        parameter.requires_grad_(".lora_" in f".{name}")
    return adapted


def merge_adapters(model: nn.Module) -> nn.Module:
    """Return a copy of a model in which plain layers with merged weights replace `Adapted` ones.

    It computes the same outputs up to rounding, and its parameters have the names from before
    `with_adapters`.
    """
    check_types(model=(model, nn.Module))
    memo = lazy_clones(model)
    for layer in model.modules():
        if isinstance(layer, Adapted):
            base = memo[id(layer)] = copy.deepcopy(layer.base, memo)
            base.weight = nn.Parameter(layer.weight.detach(), base.weight.requires_grad)
    return copy.deepcopy(model, memo)
