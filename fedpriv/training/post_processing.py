"""What a release changes besides the model: clipping norms, control variates, running statistics.

All of it is post-processing of released numbers. The running statistics are those of batch
normalisations.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real

import numpy as np
import numpy.typing as npt

from fedpriv.errors import InvalidValueError
from fedpriv.privacy.layout import FloatVector, Layout, VectorGroup
from fedpriv.support.checks import hold_numbers
from fedpriv.training.optimizers import Parameters

_SMALLEST_NORM, _LARGEST_NORM = 1e-12, 1e12
_MOST_CHANGE = 4.0  # largest factor by which a round changes a variance, for any noise
_LARGEST_MEAN, _LARGEST_VARIANCE = 1e15, 1e30


@dataclass(frozen=True)
class AdaptiveClipping:
    """Moves each clipping norm so that a fraction of the users, the quantile, is not clipped.

    After a round with norm S and private fraction b of unclipped users, the next norm is
    S·exp(−η·(b − γ)) (Andrew et al. 2019, Algorithm 1). The round itself clips and adds noise with
    the norm before it moves.
    """

    quantile: float = 0.5  # γ in (0, 1)
    learning_rate: float = 0.2  # η in (0, 10]; a round changes a norm by at most about e^η
    share: float = 0.02  # ω in (0, 1), share of the round's privacy that counts clipped users

    def __post_init__(self) -> None:
        hold_numbers(self)
        for name in ("quantile", "share"):
            if not 0.0 < getattr(self, name) < 1.0:
                raise InvalidValueError(
                    f"{name} of adaptive clipping is {getattr(self, name)}; it must be in (0, 1)"
                )
        if not 0.0 < self.learning_rate <= 10.0:
            raise InvalidValueError(
                f"learning_rate of adaptive clipping is {self.learning_rate}; it must be in (0, 10]"
            )

    def step(self, norm: float, unclipped: float) -> float:
        """Return the next clipping norm, from the noised fraction of users that were not clipped.

        A fraction outside [0, 1] is moved to the nearer end.
        """
        fraction = min(max(unclipped, 0.0), 1.0)
        next_norm = norm * math.exp(-self.learning_rate * (fraction - self.quantile))
        return min(max(next_norm, _SMALLEST_NORM), _LARGEST_NORM)


CONTROL_PREFIX = "control/"  # starts the names of control variates' tensors and of their group


@dataclass(frozen=True)
class ControlVariates:
    """A second vector that users send, as large as the update, and the server's update rule for it.

    The server keeps a control variate c of the shape of the model, initially zero, and sends it
    with each round. A user sends the difference of its own, Δc_i = c_i − c. The server then sets
    c ← c + β·Δc, where Δc is the release: the noised average of the clipped Δc_i.
    """

    norm: float  # S, the bound on the L2 norm of Δc_i
    share: float  # ω in (0, 1), share of the round's privacy
    rate: float  # β in (0, 1]; averages the noise of about 1/β rounds

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not isinstance(value, Real):
                raise InvalidValueError(f"control_{name} is {value!r}; it must be a number")
        if not 0.0 < self.share < 1.0:
            raise InvalidValueError(f"control_share is {self.share}; it must be in (0, 1)")
        if not 0.0 < self.rate <= 1.0:
            raise InvalidValueError(f"control_rate is {self.rate}; it must be in (0, 1]")
        _ = VectorGroup.single(CONTROL_PREFIX, self.norm)  # refuses an illegal norm

    def group(self, layout: Layout) -> VectorGroup:
        """Return the extra vector group for an update of this layout."""
        tensors = tuple(CONTROL_PREFIX + name for name in layout.names)
        return VectorGroup(CONTROL_PREFIX + "variates", tensors, self.norm, (1.0,) * len(tensors))

    def updated(
        self, control: Mapping[str, npt.NDArray[np.float32]], released: Mapping[str, FloatVector]
    ) -> dict[str, npt.NDArray[np.float32]]:
        """Return the control variate after a round, by parameter, saturated to float32's range."""
        limit = np.finfo(np.float32).max
        return {
            name: np.clip(c + self.rate * released[CONTROL_PREFIX + name], -limit, limit).astype(
                np.float32
            )
            for name, c in control.items()
        }


@dataclass(frozen=True)
class RunningStatistics:
    """How the server moves the running statistics of batch normalisations.

    With x̂ = (x − μ)/s and s² = v + eps, the metric is the average over users of a = mean x̂ and
    b = mean x̂² − 1, per channel. The moments about the running mean move by a share β, the
    momentum, to m₁ = β·a and m₂ = 1 + β·b. Therefore s·m₁ is added to μ, and s² is multiplied by
    m₂ − m₁². If all users' moments equal the running statistics, a = b = 0 and nothing moves. All
    of this is post-processing of released numbers.
    """

    layers: tuple[str, ...]  # names, in the order of the model
    channels: tuple[int, ...]  # of each layer
    eps: tuple[float, ...]  # ≥ 0, of each layer
    momentum: float = 0.1  # β in (0, 1]

    def __post_init__(self) -> None:
        if not len(self.layers) == len(self.channels) == len(self.eps) > 0:
            found = f"{len(self.channels)} numbers of channels and {len(self.eps)} eps"
            what = f"{len(self.layers)} normalisations have {found}"
            raise InvalidValueError(f"{what}; each of at least one needs both")
        if min(self.channels) < 1 or not all(0.0 <= eps < math.inf for eps in self.eps):
            found = f"channels of normalisations are {self.channels} and their eps {self.eps}"
            raise InvalidValueError(f"{found}; they must be positive and not negative")
        if not 0.0 < self.momentum <= 1.0:
            found = f"momentum of running statistics is {self.momentum}"
            raise InvalidValueError(f"{found}; it must be in (0, 1]")

    @property
    def shape(self) -> tuple[int]:
        """Shape of the metric, which holds a and then b of all channels, layer by layer."""
        return (2 * sum(self.channels),)

    def moved(self, statistics: Parameters, released: FloatVector) -> dict[str, np.ndarray]:
        """Return the statistics after a round, by name, given the released metric [2ΣC].

        Guarantees for any released vector: means are finite, and variances are finite and not
        negative; s² changes by a factor of at least 1/4 and at most 4.
        """
        after, start = dict[str, np.ndarray](), 0
        for layer, channels, eps in zip(self.layers, self.channels, self.eps, strict=True):
            first, second = released[start : start + 2 * channels].reshape(2, channels)
            start += 2 * channels
            mean_name, var_name = _names(layer)
            square = statistics[var_name].astype(np.float64) + eps
            m1, m2 = self.momentum * first, 1.0 + self.momentum * second
            mean = statistics[mean_name] + np.sqrt(square) * m1
            var = square * np.clip(m2 - m1**2, 1.0 / _MOST_CHANGE, _MOST_CHANGE) - eps
            after[mean_name] = np.clip(mean, -_LARGEST_MEAN, _LARGEST_MEAN).astype(np.float32)
            after[var_name] = np.clip(var, 0.0, _LARGEST_VARIANCE).astype(np.float32)
        return after

    def check(self, statistics: Mapping[str, np.ndarray]) -> None:
        """Raise InvalidValueError unless the statistics are those of exactly these layers."""
        sizes = zip(self.layers, self.channels, strict=True)
        wanted = {name: (size,) for layer, size in sizes for name in _names(layer)}
        found = {name: tensor.shape for name, tensor in statistics.items()}
        if found != wanted:
            raise InvalidValueError(f"running statistics are {found}; they must be {wanted}")


def _names(layer: str) -> tuple[str, str]:
    prefix = f"{layer}." if layer else ""
    return f"{prefix}running_mean", f"{prefix}running_var"
