"""A dataset that a partitioner dealt is the same population for workers of Ray."""

import subprocess
import sys
from pathlib import Path

import datasets
import numpy as np
import pytest
from safetensors.numpy import load_file

from fedpriv.data import load_population

DIGITS = Path(__file__).parents[2] / "simulations" / "digits.toml"
FREE_OF_NOISE = (
    "rounds=3",
    "seed=7",
    "privacy.noise_multiplier=0.0",
    "privacy.unsafe_no_privacy=true",
)
# Images of DIGITS saved as a dataset, whose partitioner makes users of unequal size.
DEALT = """
[data]
name = "hugging-face"

[data.options]
train = "{folder}/train"
test = "{folder}/test"
partitioner = "DirichletPartitioner"

[data.options.arguments]
num_partitions = 40
partition_by = "label"
alpha = 0.5
min_partition_size = 0
"""


def dealt_digits(folder: Path) -> Path:
    """Write images of DIGITS into a folder, and an experiment on them."""
    digits = load_population("digits", {"users": 1})
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    for split, rows in (("train", digits.users.fields), ("test", digits.test)):
        images = [(16 * image[0]).astype(np.uint8) for image in rows["x"]]
        columns = {"image": images, "label": rows["y"]}
        datasets.Dataset.from_dict(columns, features=features).save_to_disk(folder / split)
    start, rest = DIGITS.read_text(encoding="utf-8").split("[data]")
    model = rest[rest.index("[model]") :]
    file = folder / "dealt.toml"
    file.write_text(start + DEALT.format(folder=folder) + model, encoding="utf-8")
    return file


@pytest.mark.slow
def test_two_workers_give_what_one_process_gives(tmp_path: Path) -> None:
    experiment = dealt_digits(tmp_path)
    given = [experiment, *(f"--set={text}" for text in FREE_OF_NOISE)]
    here, there = tmp_path / "here", tmp_path / "there"
    for out, workers in ((here, []), (there, ["--engine=flower", "--workers=2"])):
        command = [sys.executable, "-c", "from fedpriv.cli import main; main()", "simulate"]
        done = subprocess.run(
            [*command, *given, "--out", out, *workers], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    expected, found = (load_file(out / "model.safetensors") for out in (here, there))
    assert expected.keys() == found.keys()
    for name, parameter in expected.items():
        assert parameter.any()
        np.testing.assert_array_equal(found[name], parameter)
