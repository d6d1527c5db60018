"""Checkpoints: the server's state in one file, bound to its plan and its ledger.

A checkpoint holds released quantities only, and never a random state: a resumed run draws fresh
cohorts and fresh noise.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from fedpriv.errors import CheckpointError
from fedpriv.ledger import Head, Ledger
from fedpriv.training.optimizers import OptimizerState
from fedpriv.training.plan import TrainingPlan
from fedpriv.training.rounds import ServerState

_FORMAT = "fedpriv checkpoint 3"
_PARTS = ("parameters", "first", "second", "statistics")
_KEPT = 3


@dataclass(frozen=True)
class Checkpoint:
    """A server state, with the plan and the point of the ledger that it belongs to."""

    state: ServerState
    plan_digest: str
    ledger_head: Head


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write `round-NNNNNN.safetensors`, named by the next round, atomically; keep the last 3."""
    state, head = checkpoint.state, checkpoint.ledger_head
    moments = (state.optimizer.first, state.optimizer.second)
    tensors = {
        f"{part}/{name}": np.asarray(tensor, order="C")
        for part, named in zip(_PARTS, (state.parameters, *moments, state.statistics), strict=True)
        for name, tensor in named.items()
    }
    metadata = {
        "format": _FORMAT,
        "round": str(state.round),
        "plan_digest": checkpoint.plan_digest,
        "ledger_count": str(head.count),
        "ledger_hash": head.hash,
        "clipping_norms": " ".join(map(repr, state.clipping_norms)),
    }
    metadata["digest"] = _digest(metadata, tensors)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"round-{state.round:06d}.safetensors"
    write_atomically(path, save(tensors, metadata))
    for old in checkpoints(folder)[:-_KEPT]:
        old.unlink(missing_ok=True)
    return path


def checkpoints(folder: Path) -> list[Path]:
    """Checkpoints of a folder, oldest first."""
    return sorted(folder.glob("round-*.safetensors"))


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint; CheckpointError if it is absent, damaged or of another format."""
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            if (found := metadata.get("format")) != _FORMAT:
                raise CheckpointError(f"{path} has format {found!r}; it must be {_FORMAT!r}")
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - no mapping
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read as a checkpoint: {error}") from error
    if metadata.pop("digest", None) != _digest(metadata, tensors):
        how = "delete it to resume from the checkpoint before it"
        raise CheckpointError(f"{path} is damaged; {how}")
    parts: dict[str, dict[str, np.ndarray]] = {part: {} for part in _PARTS}
    for key, tensor in tensors.items():
        part, _, name = key.partition("/")
        parts[part][name] = tensor
    parameters, first, second, statistics = parts.values()
    norms = tuple(map(float, metadata["clipping_norms"].split()))
    moments = OptimizerState(first, second)
    state = ServerState(int(metadata["round"]), parameters, moments, norms, statistics)
    head = Head(int(metadata["ledger_count"]), metadata["ledger_hash"])
    return Checkpoint(state, metadata["plan_digest"], head)


def _digest(metadata: Mapping[str, str], tensors: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.sha256(json.dumps(dict(sorted(metadata.items()))).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(json.dumps([name, tensor.dtype.str, tensor.shape]).encode())
        digest.update(tensor.data)
    return digest.hexdigest()


def resume(path: Path, plan: TrainingPlan, ledger: Ledger) -> ServerState:
    """State to resume from; CheckpointError if it is another plan's or the ledger lacks charges."""
    checkpoint = load_checkpoint(path)
    if checkpoint.plan_digest != plan.digest:
        found = f"{path} belongs to plan {checkpoint.plan_digest[:12]}, not to {plan.digest[:12]}"
        raise CheckpointError(f"{found}; a run can only be resumed with the plan it began with")
    if not ledger.contains_head(checkpoint.ledger_head):
        found = f"{checkpoint.ledger_head.count} charges that the ledger does not hold"
        legal = "a run can only be resumed with its own, complete ledger"
        raise CheckpointError(f"{path} has seen {found}; {legal}")
    state = checkpoint.state
    return replace(state, parameters={name: state.parameters[name] for name in plan.layout.names})


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name the file in errors of the operating system, which a failed write does not."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_atomically(path: Path, content: bytes) -> None:
    """Replace `path` by `content`, durably; a crash or a full disk leaves the old file alone."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with naming(path), partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    partial.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
