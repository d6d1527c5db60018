"""Apple's pfl: its simulated backend, federated averaging and norm clipping."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.hyperparam import NNTrainHyperParams
from pfl.model.pytorch import PyTorchModel
from pfl.privacy.privacy_mechanism import CentrallyAppliedPrivacyMechanism, NormClippingOnly
from torch import nn
from torch.nn import functional

from simulations.benchmarks.contestants import Train, Turn
from simulations.benchmarks.works import Work, flattened

_WITHOUT_EVALUATION = 10**9  # rounds until the next


class Judged(nn.Module):
    """A model with the two methods that pfl needs."""

    def __init__(
        self, model: nn.Module, losses: Callable[..., torch.Tensor] = functional.cross_entropy
    ) -> None:
        super().__init__()
        self.model, self.losses = model, losses

    def loss(self, *batch: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of a batch: inputs, then targets."""
        *inputs, targets = batch
        return self.losses(self.model(*inputs), targets).mean()

    def metrics(self, *_batch: torch.Tensor) -> dict[str, Any]:
        """Return no metrics."""
        return {}


def pfl(work: Work, device: torch.device, use: Callable[[Train], None]) -> None:
    """Prepare users as pfl's data sets of tensors, and train them one after another."""
    users = [
        PyTorchTensorDataset(tuple(t.to(device) for t in work.examples_of(user)), str(user))
        for user in range(work.users + work.copies)
    ]
    module = Judged(work.build())
    central = torch.optim.SGD(module.parameters(), lr=1.0)
    model = PyTorchModel(module, torch.optim.SGD, central)
    clipping = CentrallyAppliedPrivacyMechanism(NormClippingOnly(2.0, work.clipping_norm))
    algorithm = FederatedAveraging()

    def train(turn: Turn) -> NDArray[np.float64]:
        order = iter(turn.users)
        data = FederatedDataset(users.__getitem__, lambda: next(order))
        backend = SimulatedBackend(data, data, [clipping])
        settings = NNAlgorithmParams(
            central_num_iterations=_WITHOUT_EVALUATION,
            evaluation_frequency=_WITHOUT_EVALUATION,
            train_cohort_size=len(turn.users),
            val_cohort_size=None,
        )
        local = NNTrainHyperParams(
            local_num_epochs=turn.local.epochs,
            local_learning_rate=turn.local.learning_rate,
            local_batch_size=turn.local.batch_size,
        )
        (context,), _, _ = algorithm.get_next_central_contexts(model, 1, settings, local)
        statistics, _ = asyncio.run(
            backend.async_gather_results(model, algorithm, central_context=context)
        )
        return flattened([statistics[n] for n, p in module.named_parameters() if p.requires_grad])

    use(train)
