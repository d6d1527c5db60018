"""Settings of the whole suite."""

import torch

# Test models are tiny: threads only wait for each other, and for other tests.
torch.set_num_threads(1)
