"""A small study, and results made up for it."""

from dataclasses import replace
from pathlib import Path

import tomli_w

from fedpriv.studies import Cell, RunResult, Study

BASE: dict[str, object] = {
    "name": "tiny",
    "rounds": 2,
    "data": {"name": "synthetic", "options": {"users": 40, "shape": [4], "classes": 3}},
    "model": {"name": "softmax", "options": {"inputs": 4, "classes": 3}},
    "local": {"learning_rate": 0.5, "epochs": 1},
    "clipping": {"norm": 0.5},
    "privacy": {"sampling_probability": 0.5, "epsilon": 1.0, "delta": 1e-2},
}
STUDY: dict[str, object] = {
    "name": "tiny-study",
    "base": BASE,
    "seeds": 2,
    "target": {"epsilon": 8.0, "delta": 1e-2},
    "accuracies": [0.5],
    "axes": {
        "clipping": {"flat": [], "joint": ["clipping.strategy=joint"]},
    },
}


def study_file(folder: Path, **changes: object) -> Path:
    """A file with the study, some of its keys replaced; None removes one."""
    table = {key: value for key, value in (STUDY | changes).items() if value is not None}
    path = folder / "study.toml"
    path.write_text(tomli_w.dumps(table))
    return path


def result(study: Study, cell: Cell, folder: Path = Path(), **changes: object) -> RunResult:
    """A result of a run that was never run."""
    made = RunResult(
        arm=cell.arm.name,
        target_epsilon=cell.target.epsilon,
        delta=cell.target.delta,
        seed=cell.seed,
        settings=study.digest_of(cell, folder),
        stop="all rounds were run",
        rounds=2,
        noise_multiplier=1.5,
        epsilon=7.9,
        accuracy=0.5,
        loss=1.0,
        evaluations=((1, 0.25), (2, 0.5)),
    )
    return replace(made, **changes)
