"""Numbers that the arms of a study vary."""

from pathlib import Path

import pytest

from fedpriv.studies.study import Line, load_study, numeric_axes
from tests.studies.studying import study_file

CLIPPING = {"flat": [], "joint": ["clipping.strategy=joint"]}


def axes_of(folder: Path, **study: object) -> dict[str, tuple[Line, ...]]:
    return {axis.key: axis.lines for axis in numeric_axes(load_study(study_file(folder, **study)))}


def test_a_line_joins_arms_that_differ_in_one_number(tmp_path: Path) -> None:
    found = axes_of(tmp_path, axes={"clipping.norm": [1, 0.25, 0.5], "clipping": CLIPPING})
    assert found == {
        "clipping.norm": tuple(
            Line(
                name,
                ((0.25, f"norm-0.25_{name}"), (0.5, f"norm-0.5_{name}"), (1.0, f"norm-1_{name}")),
            )
            for name in ("flat", "joint")
        )
    }


def test_two_numbers_are_two_axes(tmp_path: Path) -> None:
    found = axes_of(tmp_path, axes={"clipping.norm": [0.25, 1.0], "rounds": [2, 4, 8]})
    assert list(found) == ["clipping.norm", "rounds"]
    assert [line.name for line in found["clipping.norm"]] == ["rounds-2", "rounds-4", "rounds-8"]
    assert [line.name for line in found["rounds"]] == ["norm-0.25", "norm-1.0"]
    assert [x for x, _ in found["rounds"][0].arms] == [2.0, 4.0, 8.0]


def test_numbers_that_follow_from_another_are_no_axis_of_their_own(tmp_path: Path) -> None:
    sizes = {
        name: [f"data.options.users={users}", f"rounds={rounds}"]
        for name, users, rounds in (("few", 40, 3), ("more", 80, 3), ("many", 160, 4))
    }
    study = load_study(study_file(tmp_path, axes={"size": sizes}))
    (axis,) = numeric_axes(study)
    assert (axis.key, axis.follows) == ("data.options.users", ("rounds",))
    assert axis.lines == (Line("all arms", ((40.0, "few"), (80.0, "more"), (160.0, "many"))),)


@pytest.mark.parametrize(
    "axes",
    [
        {"clipping": CLIPPING},
        {"server.optimizer": ["fedavg", "fedavgm"]},
        # Each arm has a norm of its own: nothing differs in the norm alone.
        {"a": {"flat": ["clipping.norm=1"], "joint": ["clipping.strategy=joint"]}},
    ],
)
def test_without_such_arms_there_is_no_axis(tmp_path: Path, axes: dict[str, object]) -> None:
    assert axes_of(tmp_path, axes=axes) == {}


def test_arms_that_are_listed_make_lines_too(tmp_path: Path) -> None:
    arms = [{"name": "slow"}, {"name": "fast", "set": ["local={learning_rate=2.0, epochs=1}"]}]
    found = axes_of(tmp_path, axes=None, arms=arms)
    assert found == {"local.learning_rate": (Line("all arms", ((0.5, "slow"), (2.0, "fast"))),)}
