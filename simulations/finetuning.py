"""Private fine-tuning of all of a model, or of adapters, after training on public text.

    FEDPRIV_DATA=FOLDER python -m simulations.finetuning [--epsilon 2 8] [--seeds 3] [--folder OUT]

A character transformer is trained without privacy on the printed text of 18 of Shakespeare's 37
plays, which count as public. Users are the speaking roles of 15 other plays, whose text has neither
capitals nor punctuation, as if typed on a telephone. The model is adapted to them, and measured on
the roles of the last four plays, in the same form. A seed assigns plays to these groups. The study
compares training all 115,040 parameters with adapters of rank 4, at each ε and without clipping and
noise.

Rates and norms were tuned on the same held-out plays; ε does not include this.
Data: the file shakespeare/speeches.jsonl.gz, one JSON object per speech, of the complete plays.
"""

import argparse
import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import nn

import fedpriv
from fedpriv.evaluation.held_out import evaluate
from fedpriv.report.tables import Column, Table
from simulations.datasets.shakespeare import CHARACTERS, said_in
from simulations.papers.results import mean_of, write_results
from simulations.transformer import CharacterTransformer

LENGTH, LEAST, MOST = 40, 8, 32  # characters of a window; windows of a role
PUBLIC, ENROLLED = 18, 15  # plays
DELTA, ROUNDS = 1e-3, 6
STEPS, BATCH = 3_000, 64  # of pre-training
CPU = torch.device("cpu")
Windows = NDArray[np.int64]  # [windows, LENGTH + 1]


@dataclass(frozen=True)
class Arm:
    """A way to fine-tune."""

    name: str
    rank: int | None  # of adapters of all linear layers of blocks; None: all is trained
    learning_rate: float
    norm: float


ARMS = (
    Arm("all of the model", None, learning_rate=0.1, norm=0.2),
    Arm("adapters of rank 4", 4, learning_rate=1.0, norm=0.6),
)


@dataclass(frozen=True)
class Found:
    """Results of an arm under some seeds."""

    epsilon: float | None  # None: without clipping and noise
    arm: str
    parameters: int  # that users send
    accuracy: tuple[float, ...]  # of the next character, on the held-out plays
    loss: tuple[float, ...]  # nats for a character


@dataclass(frozen=True)
class Plays:
    """Windows of public text, and of users and held-out users by id."""

    public: Windows
    enrolled: Mapping[str, Windows]
    held_out: Mapping[str, Windows]

    @property
    def population(self) -> fedpriv.Population:
        """Roles with enough text as users."""
        (x, y, ids), (xt, yt, owners) = _rows(self.enrolled), _rows(self.held_out)
        return fedpriv.Population.from_arrays(
            x,
            y,
            ids,
            held_out=(xt, yt),
            held_out_users=owners,
            name=f"roles of {ENROLLED} plays: {len(self.enrolled)} users",
        )


def _rows(roles: Mapping[str, Windows]) -> tuple[Windows, Windows, NDArray[np.str_]]:
    windows = np.concatenate([*roles.values()])
    ids = np.repeat([*roles], [len(texts) for texts in roles.values()])
    return windows[:, :-1].copy(), windows[:, 1:].copy(), ids


def plays_of(folder: Path, seed: int = 0) -> Plays:
    """Cut speeches into windows, and divide plays among the groups."""
    printed, *parts = said_in((PUBLIC, ENROLLED), seed, folder)
    enrolled, held_out = (
        {
            role: windows[:MOST]
            for role, text in part.items()
            if len(windows := typed(text)) >= LEAST
        }
        for part in parts
    )
    return Plays(np.concatenate([*map(_windows, printed.values())]), enrolled, held_out)


def typed(text: str) -> Windows:
    """Return windows of a text without capitals and punctuation."""
    return _windows(" ".join(re.findall("[a-z]+", text.lower().replace("'", ""))))


def _windows(text: str) -> Windows:
    codes = np.array([CHARACTERS.index(character) for character in text], np.int64)
    starts = np.arange(max(0, len(codes) - 1) // LENGTH) * LENGTH
    windows: Windows = codes[starts[:, None] + np.arange(LENGTH + 1)]
    return windows


def pretrained(
    public: Windows,
    steps: int,
    seed: int = 0,
    build: Callable[[], nn.Module] = CharacterTransformer,
    rate: float = 2e-3,
) -> nn.Module:
    """Return a model trained on the public text by AdamW, with a rate that falls to zero."""
    torch.manual_seed(seed)
    model, rows = build(), torch.from_numpy(public)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        batch = rows[torch.randint(len(rows), (BATCH,))]
        loss = nn.functional.cross_entropy(model(batch[:, :-1]), batch[:, 1:])
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        schedule.step()
    return model


def reader(data: Path, path: Path, steps: int) -> nn.Module:
    """Return a transformer of 10.7 million numbers, trained on the public plays for `steps` steps.

    These take long, so its parameters are stored in the folder `path`.
    """
    build = partial(CharacterTransformer, length=LENGTH, width=384, blocks=6, heads=6)
    file, model = path / f"reader-{steps}.safetensors", build()
    if not file.exists():
        trained = pretrained(plays_of(data).public, steps, build=build, rate=5e-4)
        path.mkdir(parents=True, exist_ok=True)
        save_file(trained.state_dict(), file)
    model.load_state_dict(load_file(file))
    return model


def task_of(model: nn.Module, arm: Arm) -> fedpriv.Task:
    """Return the task of an arm."""
    if arm.rank is None:
        return fedpriv.Task(model)
    return fedpriv.Task(fedpriv.with_adapters(model, arm.rank, 2.0 * arm.rank, ["blocks.*"]))


def tuned(
    people: fedpriv.Population, task: fedpriv.Task, arm: Arm, epsilon: float | None, seed: int
) -> fedpriv.Run:
    """Run once, in a temporary folder; without ε there is no clipping and no noise."""
    everybody, unclipped = fedpriv.Poisson(1.0), fedpriv.Flat(100.0)
    mechanism = fedpriv.Mechanism(
        everybody, unclipped, noise_multiplier=0.0, delta=DELTA, unsafe_no_privacy=True
    )
    if epsilon is not None:
        mechanism = fedpriv.Mechanism(everybody, fedpriv.Flat(arm.norm))
        mechanism = mechanism.calibrate(epsilon=epsilon, delta=DELTA, rounds=ROUNDS)
    with tempfile.TemporaryDirectory() as folder:
        return fedpriv.simulate(
            people,
            task,
            mechanism,
            local=fedpriv.SGD(arm.learning_rate, batch_size=LEAST, steps=2),
            server=fedpriv.FedAvg(1.0),
            rounds=ROUNDS,
            seed=seed,
            out=f"{folder}/run",
            evaluate_every=ROUNDS,
            checkpoint_every=ROUNDS,
            quiet=True,
        )


def table_of(results: Sequence[Found], people: int) -> Table:
    """Return a table with a row for each ε and arm."""
    rows = [
        (
            "none" if result.epsilon is None else f"{result.epsilon:g}",
            result.arm,
            f"{result.parameters:,}",
            mean_of(result.accuracy),
            f"{fmean(result.loss):.4f}"
            + (f" ± {stdev(result.loss):.4f}" if len(result.loss) > 1 else ""),
        )
        for result in results
    ]
    columns = [
        Column("ε"),
        Column("fine-tuned", "text"),
        Column("numbers sent"),
        Column("accuracy"),
        Column("loss"),
    ]
    title = f"Shakespeare's plays, {people} roles: next character of held-out plays, δ = {DELTA:g}"
    return Table(title, columns, rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, print, and write the results."""
    parser = argparse.ArgumentParser(description="fine-tuning all of a model, or adapters")
    parser.add_argument("--epsilon", type=float, nargs="+", default=[2.0, 8.0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args(arguments)
    plays = plays_of(Path(os.environ.get("FEDPRIV_DATA", "shared/data")))
    people, model = plays.population, pretrained(plays.public, options.steps)
    figures = evaluate(fedpriv.Task(model), people.test, CPU, {})
    results = [Found(0.0, "nothing", 0, (figures.accuracy or 0.0,), (figures.loss,))]
    for epsilon in (*options.epsilon, None):
        for arm in ARMS:
            task = task_of(model, arm)
            runs = [
                tuned(people, task, arm, epsilon, seed).rounds[-1]
                for seed in range(1 if epsilon is None else options.seeds)
            ]
            accuracy, loss = (tuple(getattr(r, key) for r in runs) for key in ("accuracy", "loss"))
            parameters = sum(p.size for p in task.parameters().values())
            results.append(Found(epsilon, arm.name, parameters, accuracy, loss))
            print(results[-1], flush=True)
    table = table_of(results, people.users.population)
    write_results(table, [asdict(result) for result in results], options.folder, "finetuning")


if __name__ == "__main__":
    main()
