"""What `fedpriv simulate --engine flower` refuses before Ray is started."""

from pathlib import Path

import pytest

from tests.commandline import refused

DIGITS = Path(__file__).parents[1] / "simulations" / "digits.toml"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--workers", "2"], "only --engine flower has workers"),
        (["--engine", "flower", "--workers", "0"], "--workers"),
        (["--engine", "flower", "--workers", "288"], "from 1 to 287"),
        (["--engine", "gossip"], "--engine"),
        (["--engine", "flower", "--set", "data.name=digts"], "did you mean 'digits'"),
    ],
    ids=" ".join,
)
def test_what_does_not_fit_is_refused(arguments: list[str], sentence: str, tmp_path: Path) -> None:
    assert sentence in refused("simulate", DIGITS, *arguments, cwd=tmp_path)
    assert list(tmp_path.iterdir()) == []
