"""One run in two worlds, which differ in one hostile user and are given the same noisy sums.

If noisy sums alone carry what users hold, then everything that a run writes, prints and raises is
the same to the byte. All clocks stand still, what the operating system draws is the same in both
worlds, and what is marked as "simulation only" is left out, by that mark and by nothing else.
"""

import itertools
import json
import logging
import os
import pickle
import random
import re
import secrets
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import rich.console
import tomli_w
import torch
from torch import nn

from fedpriv.cli import main
from fedpriv.data.population import HELD_OUT_USER, Population, UserStore, offsets_of
from fedpriv.engine import roads
from fedpriv.errors import ModelError
from fedpriv.ledger import ledger
from fedpriv.ledger.database import Database
from fedpriv.ledger.events import NeighbouringRelation
from fedpriv.ledger.participation import ParticipationRecord
from fedpriv.privacy import noise
from fedpriv.privacy import round as rounds
from fedpriv.privacy.gaussian_mechanism import GaussianMechanism
from fedpriv.run import run as runs
from fedpriv.run import terminal
from fedpriv.run.folder import RunFolder
from fedpriv.training.rounds import RoundResult
from simulations import loopback

NAME = "tests.two_worlds"
LOGGED, PORT = re.compile(r"\S+Z (INFO|WARNING) "), re.compile(r":\d+(?=, 2 nodes)")
MARK, MARKED = "simulation only, not private", "simulation_only"
INPUTS, CLASSES, OTHERS = 6, 3, 9
ROUNDS = 2
TRIP, END, LOOP = 1e6, 1e7, 1e8  # inputs at which models raise, end their process, or hang
NUMBERS = {
    "nan": np.nan, "inf": np.inf, "huge": 1e38, "trip": TRIP, "end": END, "loop": LOOP,
}  # fmt: skip
TIME = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Hostile:
    """One user, in two words."""

    kind: str = "normal"
    rows: int = 0  # 0: it is not there

    def data(self) -> tuple[np.ndarray, np.ndarray]:
        """Its inputs and targets."""
        rng = np.random.default_rng(9)
        x = rng.standard_normal((self.rows, INPUTS)).astype(np.float32)
        y = rng.integers(0, CLASSES, self.rows)
        some = slice(self.rows // 2, None)
        match self.kind:
            case kind if kind in NUMBERS:
                x[some] = NUMBERS[kind]
            case "illegal":
                y[some] = CLASSES + 7
            case "negative":
                y[some] = -7
            case "ignored":
                y[:] = -100
        return x, y


ABSENT = Hostile()
_hostile = ABSENT  # who is there in the world that runs now


def people() -> Population:
    """Some users of sizes as people have them, the hostile one in their midst."""
    return population(_hostile)


def population(hostile: Hostile) -> Population:
    """The same, given who is hostile."""
    rng = np.random.default_rng(1)
    sizes = np.minimum(1 + rng.pareto(1.0, OTHERS).astype(int) * 2, 12)
    data = [
        (rng.standard_normal((n, INPUTS)).astype(np.float32), rng.integers(0, CLASSES, n))
        for n in sizes.tolist()
    ]
    data.insert(OTHERS // 2, hostile.data())
    fields = {name: np.concatenate([each[i] for each in data]) for i, name in enumerate("xy")}
    test = {"x": rng.standard_normal((12, INPUTS)).astype(np.float32)}
    test["y"] = rng.integers(0, CLASSES, 12)
    test[HELD_OUT_USER] = np.repeat(["held-1", "held-2", "held-3"], 4)
    store = UserStore(fields, offsets_of([len(y) for _, y in data]))
    return Population("two worlds", store, test)


class Tripping(nn.Module):
    """Raises on some inputs, and ends the process on others."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        most = float(x.detach().abs().max()) if len(x) else 0.0
        if most == END:
            os._exit(7)
        if most == LOOP:
            time.sleep(1e6)
        if most == TRIP:
            raise ModelError(f"a secret: {x[0, 0]}")
        return x


def network(kind: str) -> nn.Module:
    """A small model."""
    head = nn.Linear(4, CLASSES)
    match kind:
        case "linear":
            return nn.Linear(INPUTS, CLASSES)
        case "tripping":
            return nn.Sequential(Tripping(), nn.Linear(INPUTS, 4), nn.ReLU(), head)
        case "dropout":
            return nn.Sequential(nn.Linear(INPUTS, 4), nn.Dropout(0.3), nn.Tanh(), head)
        case "norm":
            return nn.Sequential(nn.Linear(INPUTS, 4), nn.BatchNorm1d(4), nn.ReLU(), head)
        case _:
            return nn.Sequential(nn.Linear(INPUTS, 4), nn.Tanh(), nn.PReLU(), head)


def of_outputs(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A metric of one's own."""
    return outputs.gather(1, targets[:, None]).squeeze(1)


def told(result: RoundResult) -> None:
    """A callback that says all that it is told."""
    sys.stdout.write(f"{result}\n")


class Killed(BaseException):
    """What a run is ended by, in whose place nothing can be done."""


@dataclass(frozen=True)
class Kill:
    """Where a run is ended: at the so manieth call of a function, before it or after it."""

    place: str
    call: int
    after: bool


_PLACES: dict[str, tuple[Any, str]] = {
    "cohort recorded": (ParticipationRecord, "record"),
    "sums added up": (rounds, "add_up"),
    "charged": (ledger.Ledger, "charge"),
    "released": (rounds, "release"),
    "metrics written": (RunFolder, "append_metrics"),
    "checkpoint": (runs, "save_checkpoint"),
}


@dataclass(frozen=True)
class Case:
    """A run, and its hostile user in each of the two worlds."""

    table: dict[str, Any]
    one: Hostile
    other: Hostile
    kill: Kill | None = None


@dataclass
class Sums:
    """What was noised, by run, round and attempt; in a second world that of the first is."""

    instead: "Sums | None" = None
    found: dict[tuple[str, int, int], tuple[GaussianMechanism, rounds.PartialSum]] = field(
        default_factory=dict
    )

    def release(self, honest: Callable[..., Any]) -> Callable[..., Any]:
        """The release of a sum, or of that of the first world."""

        def released(
            mechanism: GaussianMechanism, at: Any, cohort: rounds.PartialSum, *rest: Any
        ) -> Any:
            key = at.run, at.round, at.attempt
            self.found[key] = mechanism, cohort
            if self.instead is not None:
                _, cohort = self.instead.found[key]
            return honest(mechanism, at, cohort, *rest)

        return released

    def assert_near(self, other: "Sums", users: int) -> None:
        """Both worlds noised sums no further apart than so many users are charged for."""
        assert self.found.keys() == other.found.keys()
        for key, (mechanism, one) in self.found.items():
            query, (_, two) = mechanism.query, other.found[key]
            parts = [query._numerator(each.total, each.weight) for each in (one, two)]
            for group, event in zip(query.clipping.groups, query.events, strict=True):
                spans = query.clipping.spans[group.name]
                moved = sum(
                    (a - b) ** 2
                    for span in spans
                    for a, b in zip(*(part[span].tolist() for part in parts), strict=True)
                )
                allowed = Fraction(event.clipping_norm) / Fraction(group.granularity)
                assert moved <= (users * allowed) ** 2, (key, group.name)


@dataclass(frozen=True)
class Seen:
    """All that a world tells."""

    said: tuple[str, ...]  # lines, and how it ended
    files: dict[str, bytes]

    def differences(self, other: "Seen") -> list[str]:
        """What differs, in words."""
        pairs = itertools.zip_longest(self.said, other.said)
        found = [f"said {a!r}, {b!r}" for a, b in pairs if a != b]
        names = sorted(self.files.keys() | other.files.keys())
        differing = (name for name in names if self.files.get(name) != other.files.get(name))
        return found + [f"file {name}" for name in differing]


def compare(case: Case, folder: Path) -> Sums:
    """Run a case in both worlds, which must tell the same; returns what the first one noised."""
    seen, sums = list[Seen](), Sums()
    one = sums
    for hostile in (case.one, case.other):
        seen.append(_world(case, hostile, sums, folder / str(len(seen))))
        sums, before = Sums(sums), sums
    assert not seen[0].differences(seen[1]), "\n".join(
        [*seen[0].differences(seen[1]), str(case.table), f"{case.one} {case.other}"]
    )
    replaced = bool(case.one.rows and case.other.rows)
    one.assert_near(before, _most_moved(case, replaced=replaced))
    return one


def _most_moved(case: Case, *, replaced: bool) -> int:
    """How many times the charged sensitivity a user moves a sum that is there or is another's."""
    drawn = case.table.get("sampling", {}).get("options", {}).get("examples_per_user", 1)
    return int(drawn) * (1 + replaced)


def _world(case: Case, hostile: Hostile, sums: Sums, home: Path) -> Seen:
    home.mkdir()
    (home / "run.toml").write_text(tomli_w.dumps(case.table), encoding="utf-8")
    with _still(hostile), pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        patch.setattr(rounds, "release", sums.release(rounds.release))
        said = _said(case.kill)
        if case.kill is not None:
            said += _said(None, "--resume")
    return Seen(tuple(said), dict(_files(home)))


@contextmanager
def _still(hostile: Hostile) -> Iterator[None]:
    """A world in which no time passes and the operating system draws the same each time."""
    global _hostile  # noqa: PLW0603 - populations are loaded by name
    drawn, before = random.Random(3).randbytes, _hostile
    _hostile = hostile
    clock = SimpleNamespace(monotonic=lambda: 0.0, process_time=lambda: 0.0)
    with pytest.MonkeyPatch.context() as patch:
        # A counter of keys alone: what else is drawn once in a process must not turn it.
        patch.setattr(noise, "os", SimpleNamespace(urandom=drawn))
        patch.setattr(os, "urandom", bytes)
        patch.setattr(secrets, "token_bytes", lambda size=32: bytes(size))
        patch.setattr(secrets, "token_hex", lambda size=32: bytes(size).hex())
        patch.setattr(ledger, "_now", lambda: TIME)
        patch.setattr(Database, "inode", 1)  # by which keys are bound to a file
        patch.setattr(roads, "time", clock)
        patch.setattr(terminal, "time", clock)
        patch.setattr(terminal.execute, "__defaults__", (None, clock.monotonic))
        patch.setattr(rich.console, "monotonic", clock.monotonic)
        patch.setenv("COLUMNS", "200")
        try:
            yield
        finally:
            _hostile = before


def _said(kill: Kill | None, *arguments: str) -> list[str]:
    """Lines of all that a command prints, logs and warns of, its processes too, and its end."""
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as file,
        pytest.MonkeyPatch.context() as patch,
    ):
        command = ["fedpriv", "simulate", "run.toml", "--out", "run", *arguments]
        patch.setattr(sys, "argv", command)
        patch.setattr(sys, "path", [*sys.path])
        with _into(file), warnings.catch_warnings():
            warnings.simplefilter("always")
            if kill is not None:
                _arm(kill, patch)
            try:
                main()
            except BaseException as error:
                sys.stderr.write(f"ended: {error!r}\n")
        file.seek(0)
        return [line for line in file.read().splitlines() if MARK not in line]


@contextmanager
def _into(file: Any) -> Iterator[None]:
    """Write to a file whatever this process and those that it forks print, log and warn of."""
    handler = logging.StreamHandler(file)
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s %(message)s"))
    root, kept = logging.getLogger(), [os.dup(number) for number in (1, 2)]
    level, handlers = root.level, root.handlers
    root.handlers, root.level = [handler], logging.INFO
    logging.captureWarnings(capture=True)
    try:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
        with redirect_stdout(file), redirect_stderr(file):
            yield
    finally:
        file.flush()
        logging.captureWarnings(capture=False)
        root.handlers, root.level = handlers, level
        for number, old in zip((1, 2), kept, strict=True):
            os.dup2(old, number)
            os.close(old)


def _arm(kill: Kill, patch: pytest.MonkeyPatch) -> None:
    """Have a function end the run."""
    owner, name = _PLACES[kill.place]
    honest, calls = getattr(owner, name), itertools.count(1)

    def trapped(*args: Any, **kwargs: Any) -> Any:
        last = next(calls) == kill.call
        if last and not kill.after:
            raise Killed
        found = honest(*args, **kwargs)
        if last:
            raise Killed
        return found

    patch.setattr(owner, name, trapped)


def _files(home: Path) -> Iterator[tuple[str, bytes]]:
    """Files of a folder with their rights, without what is marked."""
    for path in sorted(home.rglob("*")):
        if path.is_file() and not path.name.startswith(MARKED):
            content = path.read_bytes()
            if path.suffix == ".jsonl":
                lines = map(json.loads, content.splitlines())
                content = "\n".join(json.dumps(_unmarked(line)) for line in lines).encode()
            if path.suffix == ".safetensors":  # which writes the keys of its head in any order
                end = 8 + int.from_bytes(content[:8], "little")
                head = json.dumps(json.loads(content[8:end]), sort_keys=True)
                content = head.encode() + content[end:]
            yield f"{path.relative_to(home)} {path.stat().st_mode:o}", content


def _unmarked(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if not key.startswith(MARKED)}


# Random runs.

HOSTILE = ("normal", "nan", "inf", "huge", "illegal", "negative", "ignored")
MANY = 700  # rows, of a size that nobody else has
POLICIES: dict[str, tuple[float | None, dict[str, Any]]] = {
    "poisson": (0.7, {}),
    "poisson-examples": (0.6, {"examples_per_user": 3}),
    "fixed-size": (None, {"cohort_size": 6}),
    "every-user": (None, {}),
    "random-allocation": (None, {"rounds": 2, "participations": 1}),
    "separated": (None, {"rounds": 2, "separation": 2}),
    "poisson-within-bands": (0.7, {"rounds": 2, "separation": 2}),
}
REPLACING = {"relation": str(NeighbouringRelation.REPLACE_ONE)}


def random_case(number: int, *, killed: bool = False) -> Case:
    """A run of everything that fits together; all policies are among seven that follow."""
    dice = random.Random(number)
    policy = list(POLICIES)[number % len(POLICIES)]
    whole = policy != "poisson-examples" and dice.random() < 0.75
    unit = (
        "user" if whole or policy == "poisson-examples" else dice.choice(["example", "microbatch"])
    )
    series = policy in ("random-allocation", "separated", "poisson-within-bands")
    q, options = POLICIES[policy]
    options = dict(options)
    replacing = policy in ("every-user", "separated") and dice.random() < 0.3
    options |= REPLACING if replacing else {}
    kind, model, local = _trained(dice, whole=whole)
    table: dict[str, Any] = {
        "name": "two-worlds",
        "rounds": ROUNDS,
        "data": {"name": f"{NAME}:people"},
        "model": model,
        "privacy": {
            "unit": unit,
            "delta": 0.01,
            "epsilon": dice.choice([1e4, 1e4, 40.0]),
            "noise_multiplier": 1.0,
        },
        "sampling": {"policy": policy, "options": options},
        "clipping": _clipping(dice),
        "server": {"optimizer": dice.choice(["fedavg", "fedadam"])},
        "metrics": _metrics(dice, kind),
        "engine": {
            "processes": 2 if kind == "tripping" else dice.choice([1, 1, 2]),
            "path": "auto" if kind == "tripping" else dice.choice(["auto", "alone", "together"]),
        },
        "output": {
            "simulation_only": whole and dice.random() < 0.3,
            "checkpoint_every": dice.choice([1, 1, 2]),
        },
        "trackers": [f"{NAME}:told"],
    }
    if q is not None:
        table["privacy"]["sampling_probability"] = q
    if unit == "microbatch":
        table["privacy"]["microbatch"] = 3
    if dice.random() < 0.6:
        table["seed"] = number
    elif table["engine"]["path"] == "auto" and kind != "tripping":
        table["engine"]["path"] = "alone"  # a clock may choose another way in the other world
    if series and policy != "random-allocation" and dice.random() < 0.7:
        buffered = {"correlation": "buffered", "options": {"buffers": 1}}
        banded = {"correlation": "banded", "options": {"bands": 2}}
        table["noise"] = buffered if policy == "separated" and dice.random() < 0.5 else banded
    if not series and dice.random() < 0.3:
        table["clipping"]["adaptive"] = {"quantile": 0.6}
    if whole:
        table["local"] = local
        replacing |= policy == "fixed-size"
        _of_whole_users(dice, table, replacing=replacing)
    if whole and not replacing and policy != "poisson-within-bands" and dice.random() < 0.2:
        table.get("averaging", {}).pop("floor", None)  # over canaries too
        table["audit"] = {"canaries": 20}
    kinds = [*HOSTILE]
    if kind == "tripping":
        # In an evaluation users compute in the process of the run.
        kinds += ["trip"] * 3 + ["end"] * 3 * ("federated_evaluation" not in table)
    if unit != "user":  # whose number of records is public
        one, other = (Hostile(dice.choice(kinds), 1 + 2 * (unit != "example")) for _ in range(2))
    else:
        one = Hostile(dice.choice(kinds), dice.choice([1, 3, 4, 40, MANY]))
        other = dice.choice([ABSENT, ABSENT, Hostile(dice.choice(kinds), 5)])
    kill = Kill(dice.choice([*_PLACES]), dice.randint(1, ROUNDS), dice.random() < 0.5)
    return Case(table, one, other, kill if killed else None)


def _trained(dice: random.Random, *, whole: bool) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """A kind of model, the sections of it and of local training."""
    kind = dice.choice(["linear", "mlp", "dropout", "norm", "tripping"])
    if not whole and kind == "norm":
        kind = "linear"
    model: dict[str, Any] = {"name": f"{NAME}:network", "options": {"kind": kind}}
    length = {"batch_size": dice.choice(["all", 1, 4]), "epochs": dice.choice([1, 2])}
    local: dict[str, Any] = {"learning_rate": dice.choice([0.05, 0.5]), **length}
    match dice.choice(["sgd", "momentum", "adamw", "scaffold", "fedrecon", "capped"]):
        case "momentum":
            local |= {"momentum": 0.5, "proximal": 0.1}
        case "adamw":
            local |= {"algorithm": "adamw"}
        case "scaffold":
            local |= {"algorithm": "scaffold", "batch_size": "all"}
            local["options"] = {"control_norm": 0.5}
        case "fedrecon" if whole and kind == "mlp":
            del local["epochs"]
            local |= {"algorithm": "fedrecon", "steps": 3}
            local["options"] = {"personal_steps": 1, "personal_rate": 0.1}
            model["personal"] = ["3.*"]
        case "capped":
            local |= {"max_examples": 6}
    if kind == "mlp" and "personal" not in model and dice.random() < 0.3:
        model["adapters"] = {"rank": 1}
    if kind == "dropout" and dice.random() < 0.3:
        model["frozen"] = ["0.*"]
    return kind, model, local


def _clipping(dice: random.Random) -> dict[str, Any]:
    match dice.choice(["flat", "per-layer", "joint", "groups"]):
        case "groups":
            one = {"name": "weights", "tensors": ["*weight*"], "norm": 0.5}
            return {"groups": [one, {"name": "others", "tensors": ["*"], "norm": 0.2}]}
        case strategy:
            return {"strategy": strategy, "norm": 0.5}


def _metrics(dice: random.Random, kind: str) -> dict[str, Any]:
    report: dict[str, Any] = {"batch-norm": {"bound": 2.0}} if kind == "norm" else {}
    known: dict[str, dict[str, Any]] = {
        "accuracy": {},
        "loss": {"bound": 3.0},
        "examples": {"cap": 10},
        "label-counts": {"classes": CLASSES, "bound": 6.0},
        f"{NAME}:of_outputs": {"radius": 2.0},
    }
    chosen = dice.sample([*known], dice.randint(0, 3))
    report |= {name: known[name] for name in chosen}
    return {"report": report, "contributors_share": dice.choice([0.0, 0.05])}


def _of_whole_users(dice: random.Random, table: dict[str, Any], *, replacing: bool) -> None:
    """Sections that only users have."""
    average = dice.choice([{}, {"cap": 5}, {"cap": 5, "floor": 0.5}])
    table["averaging"] = {**average, "total_weight": 8.0} if average else {}
    personal = "personal" in table["model"]
    if personal or dice.random() < 0.3:
        table["personalisation"] = {"local": {"learning_rate": 0.1, "steps": 2}}
    if personal:
        table["metrics"]["report"] = {}
    if replacing:  # which a query of its own, of neighbours of another kind, cannot be added to
        return
    if dice.random() < 0.5:
        asked = {"noise_multiplier": 2.0, "every": 1, "sampling_probability": 0.8}
        table["federated_evaluation"] = {
            **asked,
            "report": {"accuracy": {}, "loss": {"bound": 3.0}},
        }


# Nodes and a server, each a process, whose sums are given to those of the other world.

DEADLINE = 120.0  # far above the rule of docs/deploy.md, as tests run beside others
ON_NODES: dict[str, Any] = {
    "name": "two-worlds",
    "rounds": ROUNDS,
    "seed": 1,
    "model": {"name": f"{NAME}:network", "options": {"kind": "tripping"}},
    "local": {"learning_rate": 0.5, "epochs": 1, "max_examples": 20},
    "clipping": {"norm": 1e-3, "adaptive": {}},
    "averaging": {"cap": 5, "total_weight": 10.0},
    "privacy": {
        "sampling_probability": 1.0,
        "epsilon": 1e4,
        "delta": 0.01,
        "noise_multiplier": 1.0,
    },
    "output": {"evaluate_every": 100},
    "federation": {"enrolment": "enrolment.toml", "least_nodes": 2, "deadline_seconds": DEADLINE},
}


def compare_on_nodes(one: Hostile, other: Hostile, folder: Path) -> None:
    """As `compare`, for one of six users of a node, where four are at another.

    The guarantee does not cover the server's log and `sites.json`.
    """
    home, seen, sums = folder / "site", list[Seen](), list[Sums]()
    loopback.lay_out(home, population(one).users, [6, 4])
    (home / "run.toml").write_text(tomli_w.dumps(ON_NODES), encoding="utf-8")
    for number, hostile in enumerate((one, other)):
        users = UserStore.load(home / "users" / "node-1", mmap=False).user_ids
        shutil.rmtree(home / "users" / "node-1")
        own = population(hostile).users.subset(range(6))
        UserStore(own.fields, own.offsets, users).save(home / "users" / "node-1")
        files = [str(folder / name) for name in (f"{number}.sums", "0.sums")]
        command = (sys.executable, __file__, *files)
        joining = f"--trust={NAME}:network", "--once", "--processes=1"
        with (
            loopback.server(home, home / "run.toml", "--exit", command=command) as serving,
            loopback.nodes(home, ("node-1", "node-2"), loopback.port_of(serving), *joining),
        ):
            code = serving.process.wait(4 * DEADLINE)
        lines = [line for line in serving.text.splitlines() if not LOGGED.match(line)]
        lines = [PORT.sub("", line) for line in lines]
        told = dict(_files(home / "run"))
        seen.append(
            Seen((*lines, str(code)), {n: c for n, c in told.items() if "sites.json" not in n})
        )
        sums.append(Sums(found=pickle.loads(Path(files[0]).read_bytes())))
        shutil.rmtree(home / "run")
        shutil.rmtree(home / "state")
        serving.output.unlink()
    assert not seen[0].differences(seen[1]), "\n".join(seen[0].differences(seen[1]))
    assert len(sums[0].found) == ROUNDS
    sums[0].assert_near(sums[1], 1 + bool(one.rows and other.rows))


def serve(found: Path, instead: Path, *arguments: str) -> None:
    """`fedpriv serve`, which writes down what it noises, or noises what another wrote down."""
    first = pickle.loads(instead.read_bytes()) if instead.exists() else None
    sums = Sums(None if first is None else Sums(found=first))
    sys.argv = ["fedpriv", *arguments]
    with _still(ABSENT), pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds, "release", sums.release(rounds.release))
        try:
            main()
        finally:
            found.write_bytes(pickle.dumps(sums.found))


if __name__ == "__main__":
    serve(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
