"""`fedpriv` with traps: between two steps it waits if a file says so, to be killed exactly there.

    python trapped.py FOLDER serve FILE …

What runs is the product. A trap at a place is armed by the file FOLDER/PLACE; a process that comes
there moves it to FOLDER/PLACE.reached, and goes on when that is gone. Beside, it writes down in
FOLDER/states.jsonl which state each start and each release led to, and in FOLDER/trained.jsonl for
which users training began.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path

from digests import digest_of

# The training process is started anew, with other arguments and the same environment.
FOLDER = Path(os.environ.setdefault("FEDPRIV_TRAPS", sys.argv[1]))
_HALF_SAVED = {"round": "half saved", "model": "half modelled"}


def pause(place: str) -> None:
    """Wait if the trap at this place is armed."""
    reached = FOLDER / f"{place}.reached"
    if place and (FOLDER / place).exists():
        (FOLDER / place).rename(reached)
        while reached.exists():
            time.sleep(0.01)


def note(file: str, **entry: object) -> None:
    """Add a line to a file of the folder, durably."""
    with (FOLDER / file).open("a") as stream:
        stream.write(json.dumps(entry) + "\n")
        stream.flush()
        os.fsync(stream.fileno())


def around(
    owner: object,
    name: str,
    before: str = "",
    after: str = "",
    seen: Callable[..., None] | None = None,
) -> None:
    """Set traps before and after a function, and let `seen` look at its result and arguments."""
    original = getattr(owner, name)

    @wraps(original)
    def trapped(*args, **kwargs):
        pause(before)
        result = original(*args, **kwargs)
        if seen is not None:
            seen(result, *args)
        pause(after)
        return result

    setattr(owner, name, trapped)


def set_at_server() -> None:
    """From a start to a checkpoint."""
    from fedpriv.ledger.database import Database
    from fedpriv.ledger.ledger import Ledger
    from fedpriv.ledger.participation import ParticipationRecord
    from fedpriv.privacy import round as private
    from fedpriv.run import run
    from fedpriv.run.folder import RunFolder
    from fedpriv.training import rounds

    def started(state, *_: object) -> None:
        note("states.jsonl", charge=None, after=digest_of(state.round, state.model))

    def stepped(closed, _plan, state, release, *_: object) -> None:
        stepped_to, _result = closed
        before = digest_of(state.round, state.model)
        after = digest_of(stepped_to.round, stepped_to.model)
        note("states.jsonl", charge=release.charge_hash, before=before, after=after)

    around(run, "state_to_start_from", "starting", seen=started)
    around(private, "add_up", "opened")
    around(ParticipationRecord, "record", "drawn")
    around(Ledger, "charge", "summed")
    around(private, "release", "charged")
    around(rounds, "close_round", "", "released", stepped)
    around(RunFolder, "append_metrics", after="measured")
    around(run, "save_checkpoint", after="saved")

    write, replace = Database.write, Path.replace

    def written(self, sql, *parameters) -> None:
        if sql.startswith("UPDATE head"):  # what is charged is in the transaction, not committed
            pause("half charged")
        write(self, sql, *parameters)

    def replaced(self, target) -> Path:
        if self.name.endswith(".partial"):
            pause(_HALF_SAVED.get(self.name[1:6], ""))
        return replace(self, target)

    Database.write, Path.replace = written, replaced


def set_at_node() -> None:
    """From an offer to the upload, in the main process; a lost connection is soon tried again."""
    from fedpriv.clients import connection, membership
    from fedpriv.clients.connection import Backoff
    from fedpriv.clients.journal import Journal

    membership.NodeSettings = partial(membership.NodeSettings, backoff=Backoff(0.1, 0.5))
    names = ("initial", "min", "max")
    sooner = {f"grpc.{name}_reconnect_backoff_ms": 200 for name in names}
    connection._OPTIONS = tuple({**dict(connection._OPTIONS), **sooner}.items())

    around(Journal, "record", "offered", "noted")
    parts = connection.chain  # of an upload: its header, then its chunks

    def sent(*args):
        for number, part in enumerate(parts(*args)):
            pause("uploading" if number else "answering")
            yield part

    connection.chain = sent


def set_at_worker() -> None:
    """In the training process."""
    from fedpriv.clients.training import NodeTrainer

    def trained(_answer, trainer, request, *_seconds) -> None:
        hosted = set(trainer.transport.hosted.tolist())
        users = [user for user in request.users.tolist() if user in hosted]
        note("trained.jsonl", round=request.round, attempt=request.attempt, users=users)

    around(NodeTrainer, "ready", "training", seen=trained)


if __name__ == "__main__":
    from fedpriv.__main__ import main

    set_at_server() if sys.argv[2] == "serve" else set_at_node()
    sys.argv[1:2] = []
    main()
elif __name__ == "__mp_main__":
    set_at_worker()
