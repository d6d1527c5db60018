"""Ways to train locally, by the names that a configuration gives them."""

from collections.abc import Mapping
from dataclasses import dataclass

from fedpriv.privacy.round import LocalTraining


@dataclass(frozen=True)
class SGD(LocalTraining):
    """Minibatch SGD on a user's own examples, with heavy-ball momentum and FedProx's term.

    One step on all examples is FedSGD (McMahan et al. 2017), `proximal` > 0 is FedProx
    (Li et al. 2020). Give exactly one of epochs and steps; the fields are those of `LocalTraining`.

    >>> SGD(0.5, batch_size=10, epochs=2).proximal
    0.0
    """


GRADIENT = SGD(1.0, steps=1)
"""The update is minus the gradient of the mean loss: the only training of an example's or of a
microbatch's, whose step size is the server's (Abadi et al. 2016, Algorithm 1)."""

ALGORITHMS: Mapping[str, type[LocalTraining]] = {"sgd": SGD}
"""The values of local.algorithm in a configuration."""
