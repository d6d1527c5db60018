"""Settings of the whole suite."""

import torch
from hypothesis import settings

# Test models are tiny: threads only wait for each other, and for other tests.
torch.set_num_threads(1)

# How long an example takes says more about the machine than about the code.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
