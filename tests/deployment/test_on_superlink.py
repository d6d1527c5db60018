"""A SuperLink and two SuperNodes on loopback, with TLS and keys, train what one process trains."""

from pathlib import Path

import numpy as np
import pytest
import tomli_w
from safetensors.numpy import load_file

from fedpriv.config import load_config
from fedpriv.federated.checkpoint import checkpoints
from simulations import loopback
from tests.commandline import fedpriv
from tests.deployment.superlink import superlink, supernodes

DIGITS = Path(__file__).parents[2] / "simulations" / "digits.toml"
SETTINGS = (
    "rounds=2",
    "seed=7",
    "privacy.noise_multiplier=0.0",
    "privacy.unsafe_no_privacy=true",
)


@pytest.mark.slow
def test_enrolled_supernodes_train_what_one_process_trains(tmp_path: Path) -> None:
    loopback.lay_out_digits(tmp_path, (144, 143))
    given = [f"--set={text}" for text in SETTINGS]
    done = fedpriv("simulate", DIGITS, *given, "--out", tmp_path / "here")
    assert done.returncode == 0, done.stderr
    enrolment = f'federation.enrolment="{tmp_path / "enrolment.toml"}"'
    nodes = {
        name: f'node="{name}" users="{tmp_path / "users" / name}" device="cpu"'
        for name in ("node-1", "node-2")
    }
    config = load_config(DIGITS, [*SETTINGS, enrolment, "federation.least_nodes=2"])
    text = tomli_w.dumps(config.model_dump(exclude_none=True))
    with superlink(tmp_path) as link, supernodes(link, nodes):
        run = link.run(experiment=text, out=str(tmp_path / "there"))
        assert link.finished(run) == "finished:completed", logs(tmp_path)
    here, there = (load_file(tmp_path / made / "model.safetensors") for made in ("here", "there"))
    assert here.keys() == there.keys()
    for name, parameter in here.items():
        assert parameter.any()
        np.testing.assert_allclose(there[name], parameter, atol=1e-6)
    assert len(checkpoints(tmp_path / "there" / "checkpoints")) > 0


def logs(folder: Path) -> str:
    """What all processes printed."""
    return "\n".join(f"{p}:\n{p.read_text()}" for p in sorted(folder.glob("*.log")))
