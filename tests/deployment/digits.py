"""DIGITS without noise, for runs that must come to the same model wherever users train."""

from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from tests.commandline import fedpriv

DIGITS = Path(__file__).parents[2] / "fedpriv/experiment/bundled/digits.toml"
NOISELESS = (
    "rounds=3",
    "seed=7",
    "privacy.noise_multiplier=0.0",
    "privacy.unsafe_no_privacy=true",
)


def in_process(out: Path, *assignments: str, experiment: Path = DIGITS) -> None:
    """Run the experiment in this process."""
    given = [f"--set={text}" for text in (*NOISELESS, *assignments)]
    done = fedpriv("simulate", experiment, *given, "--out", out)
    assert done.returncode == 0, done.stderr


def assert_same_model(one: Path, other: Path) -> None:
    """The models of two run folders are equal, to the last bit."""
    models = [load_file(folder / "model.safetensors") for folder in (one, other)]
    assert models[0].keys() == models[1].keys()
    for name, parameter in models[0].items():
        assert parameter.any()
        np.testing.assert_array_equal(models[1][name], parameter)
