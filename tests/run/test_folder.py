import json
import os
import stat
from pathlib import Path

import pytest

from fedpriv.errors import InvalidValueError
from fedpriv.run import folder
from fedpriv.run.folder import RunFolder, held
from fedpriv.run.simulate import run_simulation
from tests.commandline import refused


def test_metrics_come_back_in_order(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert list(folder.read_metrics()) == []
    rows = [{"round": i, "epsilon": i / 3} for i in range(3)]
    for row in rows:
        folder.append_metrics(row)
    assert list(folder.read_metrics()) == rows


@pytest.mark.parametrize("cut", range(1, 20))
def test_a_line_cut_short_by_a_crash_loses_only_itself(tmp_path: Path, cut: int) -> None:
    folder = RunFolder(tmp_path)
    folder.append_metrics({"round": 0})
    line = json.dumps({"round": 1, "epsilon": 0.5}).encode()
    with folder.metrics.open("ab") as file:
        file.write(line[:cut])
    folder.append_metrics({"round": 2})
    assert list(folder.read_metrics()) == [{"round": 0}, {"round": 2}]


def test_a_line_may_be_cut_short_within_a_character(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.append_metrics({"round": 0, "figures": {"F₁": 0.5}})
    line = folder.metrics.read_bytes()
    with folder.metrics.open("ab") as file:
        file.write(line[: line.index("₁".encode()) + 1])
    folder.append_metrics({"round": 2})
    assert [row["round"] for row in folder.read_metrics()] == [0, 2]


@pytest.mark.parametrize("name", ["metrics", "measurement"])
def test_a_line_is_on_the_disk_before_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder, synced = RunFolder(tmp_path), list[tuple[int, int]]()

    def record(descriptor: int) -> None:
        found = os.fstat(descriptor)
        synced.append((found.st_ino, found.st_size))

    monkeypatch.setattr(os, "fsync", record)
    append = getattr(folder, f"append_{name}")
    append({"round": 1})
    (file,) = tmp_path.iterdir()
    line, names = file.stat(), tmp_path.stat().st_ino
    append({"round": 2})
    assert synced == [
        (line.st_ino, line.st_size),
        (names, tmp_path.stat().st_size),  # of the new file
        (line.st_ino, file.stat().st_size),
    ]


def test_a_run_under_way_is_read_as_far_as_its_ledger_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digits = Path(__file__).parents[2] / "fedpriv/experiment/bundled/digits.toml"
    run = run_simulation(digits, ["rounds=2"], tmp_path / "run", resume=False)
    metrics = RunFolder(run.folder).metrics
    *_, last = metrics.read_text().splitlines()
    later = json.loads(last) | {"round": 3, "charge": "5f" * 32}

    def charged_and_released_meanwhile(*given: object) -> bool:
        with metrics.open("a") as file:
            file.write(json.dumps(later) + "\n")
        return True

    monkeypatch.setattr(folder, "_verified", charged_and_released_meanwhile)
    assert [each.round for each in folder.read_run(run.folder).rounds] == [1, 2]


def test_names_may_hold_what_ends_lines_elsewhere(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    row = {"round": 1, "figures": {"a\u2028b\x85c\x0cd\re\nf": 0.5}}
    folder.append_metrics(row)
    assert list(folder.read_metrics()) == [row]


def test_a_folder_that_holds_a_run_is_refused(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    folder.plan.write_text("")
    for _ in range(2):
        with pytest.raises(InvalidValueError, match="holds a run already"):
            folder.create()
        folder.model.write_bytes(b"")  # as a run that was stopped leaves it too


@pytest.mark.parametrize("file", ["model.safetensors", "study.toml"])
def test_a_run_does_not_replace_the_model_of_a_search_or_hide_in_a_study(
    tmp_path: Path, file: str
) -> None:
    folder = RunFolder(tmp_path)
    (tmp_path / file).write_bytes(b"")
    with pytest.raises(InvalidValueError, match="exists already; choose another folder"):
        folder.create()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        RunFolder(tmp_path / "file" / "run").create()


def test_a_run_is_held_by_one_process_at_a_time(tmp_path: Path) -> None:
    # The lock is that of an open file, so a second opening stands for another process.
    again = "it that another process uses; stop that process first"
    for _ in range(2):
        with held(tmp_path, "it"), pytest.raises(InvalidValueError, match=again):
            held(tmp_path, "it").__enter__()


def test_a_run_that_another_process_begins_is_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    # Before it has a plan.
    with held(out, "a run"):
        assert "that another process uses" in refused("simulate", "digits", "--out", out)
    assert list(out.iterdir()) == []


def test_only_its_owner_reads_what_is_not_private(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for number in (1, 2):
        folder.append_simulation_only({"round": number})
        assert stat.S_IMODE(folder.simulation_only.stat().st_mode) == 0o600
    assert folder.simulation_only.read_text() == '{"round":1}\n{"round":2}\n'
