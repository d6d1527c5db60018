"""Enrolment: one position and one node for each user, whatever the order of the file."""

import random
import re
from pathlib import Path

import numpy as np
import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from fedpriv.data.population import plain_id
from fedpriv.errors import InvalidValueError
from fedpriv.server.enrolment import Enrolment

PAGE = Path(__file__).parents[2] / "docs" / "identity.md"
ID = "0123456789abcdef" * 2
NAMED = f'population = "{ID}"\n'
TWO = f"""{NAMED}
[nodes.b]
users = ["u3", "u1"]

[nodes.a]
users = ["u2", "U9"]
"""
LINES = st.text(st.characters(categories=["L", "N", "P", "S"]), min_size=1, max_size=12)
NAMES = LINES.filter(
    lambda name: "/" not in name and name[0] != "." and len(name.encode()) <= 64,
)


@st.composite
def enrolled(draw: st.DrawFn) -> dict[str, list[str]]:
    """Node → ids of its users, valid."""
    ids = draw(st.lists(LINES, unique_by=plain_id, min_size=1, max_size=12))
    nodes = draw(st.lists(NAMES, unique=True, min_size=1, max_size=len(ids)))
    users: dict[str, list[str]] = {node: [] for node in nodes}
    for number, user in enumerate(ids):
        users[nodes[number % len(nodes)]].append(user)
    return users


def load(tmp_path: Path, text: str) -> Enrolment:
    path = tmp_path / "enrolment.toml"
    path.write_text(text, encoding="utf-8")
    return Enrolment.load(path)


def test_a_file_is_read(tmp_path: Path) -> None:
    enrolment = load(tmp_path, TWO)
    assert (enrolment.population_id, enrolment.population) == (ID, 4)
    assert enrolment.nodes == ("a", "b")
    assert enrolment.user_ids == ("U9", "u1", "u2", "u3")
    assert enrolment.users_of("a").tolist() == [0, 2]
    assert enrolment.users_of("b").tolist() == [1, 3]
    assert repr(enrolment) == "Enrolment(population=4, nodes=2)"


@given(enrolled(), st.integers(0, 2**32))
def test_order_changes_nothing(users: dict[str, list[str]], seed: int) -> None:
    shuffler, nodes = random.Random(seed), list(users)
    shuffler.shuffle(nodes)
    shuffled = {node: shuffler.sample(users[node], len(users[node])) for node in nodes}
    one, two = Enrolment(ID, users), Enrolment(ID, shuffled)
    assert (one.user_ids, one.nodes) == (two.user_ids, two.nodes)
    for node in nodes:
        assert one.users_of(node).tolist() == two.users_of(node).tolist()


@given(enrolled())
def test_positions_are_a_partition_and_name_the_nodes_users(users: dict[str, list[str]]) -> None:
    enrolment = Enrolment(ID, users)
    positions = np.concatenate([enrolment.users_of(node) for node in enrolment.nodes])
    assert sorted(positions.tolist()) == list(range(sum(map(len, users.values()))))
    assert enrolment.population == len(positions)
    assert list(enrolment.user_ids) == sorted(enrolment.user_ids)
    for node, ids in users.items():
        mine = enrolment.users_of(node)
        assert mine.dtype == np.int64
        assert np.all(np.diff(mine) > 0)
        assert [enrolment.user_ids[position] for position in mine] == sorted(ids)


@given(enrolled())
def test_what_is_written_as_toml_is_what_is_read(
    tmp_path_factory: pytest.TempPathFactory, users: dict[str, list[str]]
) -> None:
    nodes = {node: {"users": ids} for node, ids in users.items()}
    loaded = load(
        tmp_path_factory.mktemp("toml"), tomli_w.dumps({"population": ID, "nodes": nodes})
    )
    expected = Enrolment(ID, users)
    assert (loaded.population_id, loaded.users) == (ID, expected.users)


def test_a_move_between_nodes_changes_no_position() -> None:
    one = Enrolment(ID, {"a": ["u1", "u2"], "b": ["u3"]})
    two = Enrolment(ID, {"c": ["u3", "u2"], "b": ["u1"]})
    assert one.user_ids == two.user_ids


def test_whoever_has_no_id_of_the_population_is_offered_one(tmp_path: Path) -> None:
    sentence = r"key population is absent; .* put (population = \"[0-9a-f]{32}\") in front of all"
    offered = set()
    for _ in range(2):
        with pytest.raises(InvalidValueError, match=sentence) as caught:
            load(tmp_path, TWO.removeprefix(NAMED))
        offered.add(re.search(sentence, str(caught.value))[1])
    assert len(offered) == 2
    for line in offered:
        text = f"{line}\n{TWO.removeprefix(NAMED)}"
        assert load(tmp_path, text).population_id == line.split('"')[1]


@given(enrolled(), st.data())
def test_a_user_is_enrolled_once(users: dict[str, list[str]], data: st.DataObject) -> None:
    user = data.draw(st.sampled_from([user for ids in users.values() for user in ids]))
    node = data.draw(st.sampled_from([*sorted(users), "another"]))
    with pytest.raises(InvalidValueError, match="a user must be enrolled once"):
        Enrolment(ID, users | {node: [*users.get(node, []), user]})


def test_positions_are_the_enrolments_own(tmp_path: Path) -> None:
    enrolment = load(tmp_path, TWO)
    with pytest.raises(ValueError, match="read-only"):
        enrolment.users_of("a")[0] = 3
    users = {"a": ["u1"]}
    enrolment = Enrolment(ID, users)
    users["a"].append("u2")
    assert enrolment.population == 1


def test_an_unknown_node_is_refused_without_naming_others(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match=r"^node 'c' is not enrolled$"):
        load(tmp_path, TWO).users_of("c")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "key nodes is absent"),
        ("[nodes", "is not valid TOML"),
        ("[nodes]", "nodes: there is none"),
        ("nodes = 3", "nodes is 3"),
        ("nodes = {a = 3}", "nodes.a is 3"),
        ("[nodes.a]", "key nodes.a.users is absent"),
        ("[nodes.a]\nuser = ['u']", "unknown key nodes.a.user"),
        ("[node.a]\nusers = ['u']", "unknown key node"),
        ("[nodes.a]\nusers = 'u'", "nodes.a.users is 'u'"),
        ("[nodes.a]\nusers = []", "nodes.a.users is empty"),
        ("[nodes.a]\nusers = ['u', 7]", "nodes.a.users.1 is 7"),
        ("[nodes.a]\nusers = ['']", "nodes.a.users.0 is ''; an id must be one printable line"),
        ("[nodes.a]\nusers = [' u']", "nodes.a.users.0 is ' u'"),
        ('[nodes.a]\nusers = ["u\\n"]', "nodes.a.users.0 is 'u\\n'"),
        ("[nodes.a]\nusers = ['u', 'u']", "nodes.a.users.1 is 'u', who is enrolled at node 'a'"),
        ("[nodes.a]\nusers = ['é']\n[nodes.b]\nusers = ['e\u0301']", "who is enrolled at node 'a'"),
        ("[nodes.'a/b']\nusers = ['u']", "the name of a node is 'a/b'"),
        ("[nodes.a]\nusers = ['u']\n[nodes.a]\nusers = ['v']", "is not valid TOML"),
        ("[nodes.a]\nusers = ['u']\n[users.u]\nshared = true", "unknown key users"),
        ("[nodes.a]\nusers = ['u']\nshared = true", "unknown key nodes.a.shared"),
        ("population = 3\nnodes = {}", "population is 3"),
        (
            "population = ''\nnodes = {}",
            "population is ''",
        ),
        (
            f"population = '{ID[1:]}'\nnodes = {{}}",
            "it must be 32 lower-case hexadecimal digits, drawn at rand",
        ),
        (
            f"population = '{ID.upper()}'\nnodes = {{}}",
            "it must be 32 lower-case hexadecimal digits",
        ),
        (f"nodes = {{}}\n[population]\nid = '{ID}'", "population is {'id': "),
        ("shared = ['u']\n[nodes.a]\nusers = ['u']", "unknown key shared"),
        (
            "[nodes.a]\nusers = [{id = 'u', shared = true}]",
            "nodes.a.users.0 is {'id': 'u', 'shared': True}",
        ),
    ],
)
def test_errors_name_file_and_key(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(InvalidValueError) as caught:
        load(tmp_path, text if "population" in text else NAMED + text)
    assert str(caught.value).startswith(str(tmp_path / "enrolment.toml"))
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match="cannot be read: No such file"):
        Enrolment.load(tmp_path / "absent.toml")
    (tmp_path / "latin.toml").write_bytes(b"# \xe9\n")
    with pytest.raises(InvalidValueError, match="is not valid TOML"):
        Enrolment.load(tmp_path / "latin.toml")


def test_the_examples_of_the_guide_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = PAGE.read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    Path("enrolment.toml").write_text(re.search(r"```toml\n(.*?)```", page, re.DOTALL)[1])
    names: dict[str, object] = {}
    for example in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(example, names)
    enrolment = names["enrolment"]
    assert isinstance(enrolment, Enrolment)
    assert (enrolment.population, enrolment.users_of("hospital-a").tolist()) == (3, [1, 2])
