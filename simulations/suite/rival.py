"""Apple's pfl on an arm of the suite: its algorithm, its mechanism and its accountant."""

from collections.abc import Iterator

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByUser
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.model.pytorch import PyTorchModel
from pfl.privacy import (
    CentrallyAppliedPrivacyMechanism,
    GaussianMechanism,
    PLDPrivacyAccountant,
)
from torch import nn

import fedpriv
from simulations.benchmarks.rival_pfl import Judged
from simulations.suite.arms import Trained, Work, digest, timed


def pfl(work: Work) -> Trained:
    """Train as pfl's benchmarks do, with cohorts of a fixed size and averages over users."""
    task, privacy = work.task, work.privacy
    np.random.seed(work.seed)  # from which pfl draws
    torch.manual_seed(work.seed)
    users = users_of(work.people)
    losses = fedpriv.Task(work.model, task.loss).loss
    assert callable(losses)
    module = Judged(work.model, losses)
    step = _server(task.server, [p for p in module.parameters() if p.requires_grad])
    order = _drawn(len(users), task.cohort, work.seed)
    data = FederatedDataset(users.__getitem__, lambda: next(order))
    epsilon, processors = None, [WeightByUser()]
    if privacy.epsilon is not None:
        accountant = PLDPrivacyAccountant(
            num_compositions=task.rounds,
            sampling_probability=privacy.probability(task, len(users)),
            mechanism="gaussian",
            delta=privacy.delta(task),
            noise_parameter=work.mechanism.noise_multiplier,
            noise_scale=task.cohort / task.noise_cohort if privacy.as_if else 1.0,
        )
        noise = GaussianMechanism.from_privacy_accountant(accountant, task.clipping_norm)
        epsilon = float(accountant.epsilon)
        processors.append(CentrallyAppliedPrivacyMechanism(noise))
    _, *seconds = timed(
        lambda: FederatedAveraging().run(
            NNAlgorithmParams(
                central_num_iterations=task.rounds,
                evaluation_frequency=task.rounds,
                train_cohort_size=task.cohort,
                val_cohort_size=None,
            ),
            SimulatedBackend(data, data, processors),
            PyTorchModel(module, torch.optim.SGD, step),
            NNTrainHyperParams(
                local_num_epochs=task.local.epochs,
                local_learning_rate=task.local.rate,
                local_batch_size=task.local.batch_size,
            ),
            NNEvalHyperParams(local_batch_size=None),
            send_metrics_to_platform=False,
        )
    )
    trained = work.model.named_parameters()
    tensors = {name: p.detach().numpy() for name, p in trained if p.requires_grad}
    given = digest([tensor.numpy() for tensor in user.raw_data] for user in users)
    return Trained(tensors, epsilon, None, given, *seconds)


def users_of(people: fedpriv.Population) -> list[PyTorchTensorDataset]:
    """Each user's rows, as pfl's data sets of tensors."""
    fields = [torch.from_numpy(people.users.fields[name]) for name in ("x", "y")]
    parts = zip(*(torch.split(f, people.users.sizes.tolist()) for f in fields), strict=True)
    return [PyTorchTensorDataset(part, str(user)) for user, part in enumerate(parts)]


def _drawn(users: int, cohort: int, seed: int) -> Iterator[int]:
    """Users of one cohort after another, each without replacement."""
    draw = np.random.default_rng(seed)
    while True:
        yield from draw.permutation(users)[:cohort].tolist()


def _server(
    server: fedpriv.FedAvg | fedpriv.FedAdam, parameters: list[nn.Parameter]
) -> torch.optim.Optimizer:
    """The same rule as fedpriv's."""
    rate = server.learning_rate
    assert isinstance(rate, float)
    if isinstance(server, fedpriv.FedAvg):
        return torch.optim.SGD(parameters, lr=rate)
    adam = torch.optim.Adam(parameters, lr=rate, betas=(server.beta1, server.beta2), eps=server.tau)
    # torch corrects moments for a start at zero, which FedAdam does not; late steps need none.
    for p in parameters:
        adam.state[p] = {
            "step": torch.tensor(1e9),
            "exp_avg": torch.zeros_like(p),
            "exp_avg_sq": torch.full_like(p, server.tau**2),
        }
    return adam
