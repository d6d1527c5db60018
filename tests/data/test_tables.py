"""Tests of tables as people have them, brought into a population through every entry."""

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from sklearn.preprocessing import LabelEncoder
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from fedpriv.clients.users import load_users
from fedpriv.data import Population, from_arrays
from fedpriv.data.population import HELD_OUT_USER
from fedpriv.errors import DataError, InvalidValueError

IDS = ["ann", "bob", "ann", "eve", "bob", "eve"]
IN_ORDER = [0, 2, 1, 4, 3, 5]  # rows of ann, bob and eve
X = np.arange(12.0).reshape(6, 2) / 8
TEXTS = np.array(["no", "yes", "no", "maybe", "yes", "no"])


class Items(torch.utils.data.Dataset):
    def __init__(self, items):
        self.items, self.columns = items, ["of no frame"]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, number):
        return self.items[number]


class Stream(IterableDataset):
    def __iter__(self):
        return iter([(0.0, 0)])


def of_grouped(wrap):
    def make(x, y):
        rows = {name: [row for row in range(6) if IDS[row] == name] for name in sorted({*IDS})}
        parts = {name: wrap(np.asarray(x)[own], np.asarray(y)[own]) for name, own in rows.items()}
        return Population.from_grouped(parts, held_out=wrap(np.asarray(x), np.asarray(y)))

    return make


def items(x, y):
    return Items(list(zip(x, y, strict=True)))


ENTRIES = {
    "arrays": lambda x, y: Population.from_arrays(x, y, IDS, held_out=(x, y)),
    "grouped pairs": of_grouped(lambda x, y: (x, y)),
    "grouped fields": of_grouped(lambda x, y: {"x": x, "y": y}),
    "grouped datasets": of_grouped(items),
    "dataset": lambda x, y: Population.from_dataset(items(x, y), IDS, held_out=items(x, y)),
    "dicts": lambda x, y: Population.from_dataset(
        Items([{"x": one, "y": other} for one, other in zip(x, y, strict=True)]), IDS
    ),
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_numbers_become_what_a_model_trains_on_and_text_classes(entry):
    for kind, expected in (("f8", "f4"), (">f4", "f4"), ("u2", "i8"), ("u1", "u1"), ("?", "?")):
        people = ENTRIES[entry](X.astype(kind), np.arange(6, dtype="i4"))
        x = people.users.fields["x"]
        assert x.dtype == np.dtype(expected)
        np.testing.assert_array_equal(x, X.astype(kind)[IN_ORDER].astype(expected))
        assert people.users.fields["y"].tolist() == IN_ORDER
        assert people.classes is None
    people, known = ENTRIES[entry](X, TEXTS), LabelEncoder().fit(TEXTS)
    assert people.classes == tuple(known.classes_)
    assert not people.classes_given
    np.testing.assert_array_equal(people.users.fields["y"], known.transform(TEXTS[IN_ORDER]))
    if people.test:
        np.testing.assert_array_equal(people.test["y"], known.transform(TEXTS))


def test_a_node_reads_its_file_as_a_population_does(tmp_path: Path) -> None:
    np.savez(tmp_path / "u.npz", x=X, y=np.arange(6, dtype="u4"), user_id=np.array(IDS))
    users = load_users(str(tmp_path / "u.npz"))
    assert (users.fields["x"].dtype, users.fields["y"].dtype) == (np.float32, np.int64)


def labelled_by_itself():
    return Population.from_arrays(X, TEXTS, IDS)


def labelled_by_a_list():
    return Population.from_arrays(X, TEXTS, IDS, classes=["yes", "no", "maybe"])


def test_a_node_takes_classes_from_a_public_list_alone() -> None:
    path = f"{__name__}:labelled_by_"
    with pytest.raises(
        DataError, match=r"labels of this node's own users.*give classes=\[\.\.\.\]"
    ):
        load_users(f"{path}itself")
    assert load_users(f"{path}a_list").fields["y"].tolist() == [1, 1, 0, 0, 2, 1]


def with_an_unknown_label():
    labels = [*TEXTS[:5], None]
    frame = pd.DataFrame({"a": [None, *X[1:, 0]], "y": labels, "who": IDS})
    frame.loc[1, "y"] = "perhaps"
    return Population.from_frame(frame, y="y", user="who", classes=["yes", "no", "maybe"])


def test_a_node_leaves_out_users_with_unknown_labels_alone() -> None:
    users = load_users(f"{__name__}:with_an_unknown_label")
    assert [users.id_of(user) for user in sorted(users.broken)] == ["bob", "eve"]
    assert users.fields["y"].tolist() == [1, 1]
    assert np.isnan(users.fields["x"][:, 0]).tolist() == [True, False]


def test_classes_are_numbered_alike_in_held_out_rows() -> None:
    def made(y=TEXTS, held_out=("never", "no"), **given):
        return Population.from_arrays(X, y, IDS, held_out=(X[:2], [*held_out]), **given)

    assert made().classes == ("maybe", "never", "no", "yes")
    assert made().test["y"].tolist() == [1, 2]
    listed = made(classes=["yes", "never", "no", "maybe"])
    assert (listed.test["y"].tolist(), listed.classes_given) == ([1, 2], True)
    with pytest.raises(DataError, match=r"'y' has no label, or one that is none of .*in row 0;"):
        made(classes=["no", "yes", "maybe"])
    levels = pd.Categorical(TEXTS, ["no", "maybe", "yes"], ordered=True)
    assert made(pd.Series(levels), ("yes", "no")).test["y"].tolist() == [2, 0]
    numbers = Population.from_arrays(X, [-1, 1, 1, -1, 1, 1], IDS, classes=[-1, 1])
    assert numbers.users.fields["y"].tolist() == [0, 1, 1, 1, 0, 1]
    assert numbers.classes == ("-1", "1")
    named = Population.from_arrays(X, [0, 1, 1, 0, 1, 1], IDS, classes=["no", "yes"])
    assert (named.users.fields["y"].tolist(), named.classes) == ([0, 1, 1, 1, 0, 1], ("no", "yes"))


def test_held_out_rows_may_have_text_by_which_they_are_grouped() -> None:
    rows = {"x": X[:2], "site": np.array(["north", "south"])}
    people = Population.from_arrays(X, TEXTS, IDS, held_out=(rows, ["no", "yes"]))
    assert people.test["site"].tolist() == ["north", "south"]


GAP = np.where(np.arange(12).reshape(6, 2) % 5 == 3, np.nan, X)  # in rows 1 and 4


def test_a_number_beyond_float32_refuses_nobody() -> None:
    x = X.copy()
    x[1, 0] = -1e300
    stored = Population.from_arrays(x, TEXTS, IDS).users.fields["x"]
    assert np.isneginf(stored).sum() == 1
    assert np.isfinite(stored).sum() == x.size - 1


def test_a_user_without_some_numbers_refuses_nobody_else() -> None:
    assert np.isnan(Population.from_arrays(GAP, TEXTS, IDS).users.fields["x"]).sum() == 2
    frame = FRAME.assign(age=[1, None, 2, None, 3, None])
    people = Population.from_frame(frame, y="label", user="who")
    assert np.isnan(people.users.fields["x"]).sum() == 3
    whole = pd.DataFrame({"a": pd.Series([None, 1, 2, 1, 1, 1], dtype=object)})
    for x in (whole, [None, 1.5, 2, 1, 1, 1]):
        people = Population.from_arrays(x, TEXTS, IDS)
        assert np.isnan(people.users.fields["x"]).sum() == 1
        people.users.refuse_broken()


HOLE = [1, None, 0, 1, 2, 0]  # bob's


@pytest.mark.parametrize("y", [pd.array(HOLE, "Int64"), np.array(HOLE, float), pa.array(HOLE)])
@pytest.mark.parametrize("kind", [np.int64, np.uint8, np.float64])
def test_a_missing_whole_number_among_labels_is_a_fault_of_its_user_alone(y, kind) -> None:
    held_out = (X[:2], np.array([0, 1], kind))
    people = Population.from_arrays(X, y, IDS, held_out=held_out)
    assert people.users.fields["y"].tolist() == [1, 0, 1, 0]
    assert people.users.fields["y"].dtype == people.test["y"].dtype
    with pytest.raises(DataError, match=r"'y' has no value .* row 0 of user 'bob'; 1 of 3 users"):
        people.users.refuse_broken()
    assert [*Population.from_arrays(X, y, IDS).users.broken] == [1]


def test_a_missing_number_to_predict_is_a_fault_of_its_user_alone() -> None:
    y = np.array([1.5, np.nan, 0, 1, 2, 0])
    broken = Population.from_arrays(X, y, IDS, held_out=(X[:2], [0.5, 1.5])).users.broken
    assert broken == {1: "field 'y' has no value (None or NaN), in row 0 of user 'bob'"}


def test_a_label_that_is_no_whole_number_is_its_users_fault_if_held_out_ones_are() -> None:
    for odd in (0.5, 2.0**25, -np.inf):
        y = np.array([1, odd, 0, 1, 2, 0])
        people = Population.from_arrays(X, y, IDS, held_out=(X[:2], [0, 1]), classes=[0, 1, 2])
        assert people.users.fields["y"].tolist() == [1, 0, 1, 0]
        assert "a fraction or a number beyond 24 bits" in people.users.broken[1]


def test_an_empty_text_is_a_missing_label_and_no_class() -> None:
    texts = ["b", " ", "a", "b", "b", "a"]
    for y in (texts, pd.Series(texts, dtype="category")):
        people = Population.from_arrays(X, y, IDS)
        assert people.classes == ("a", "b")
        with pytest.raises(DataError, match=r"'y' has no label, or .* user 'bob'; 1 of 3 users"):
            people.users.refuse_broken()
    with pytest.raises(DataError, match="field 'y' holds numbers as text"):
        Population.from_arrays(X, ["2", "", "1", "2", "2", "1"], IDS)


def test_classes_have_the_order_of_arrows_dictionaries() -> None:
    levels = pd.Categorical(TEXTS, ["no", "yes", "maybe"])
    table = pa.Table.from_pandas(FRAME[["who", "age"]].assign(label=levels))
    halves = pa.concat_tables([table[:3], table[3:]])
    for frame in (table, halves, table.to_batches()[0]):
        people = Population.from_frame(frame, y="label", user="who")
        assert people.classes == ("no", "yes", "maybe")
        assert people.users.fields["y"].tolist() == [0, 0, 1, 1, 2, 0]
    with pytest.raises(DataError, match="column 'label' holds text or categories"):
        Population.from_frame(table, x=["label"], y="age", user="who")


@pytest.mark.parametrize(
    ("x", "y", "given", "message"),
    [
        (
            X,
            TEXTS,
            {"held_out": (GAP, TEXTS)},
            "column 1 of held-out field 'x' has no value .* in row 1; 2 of 6 rows",
        ),
        (X, [1, None, 0, 1, None, 1], {}, "'y' has no value .* user 'bob'; 1 of 3 users"),
        (X, ["a", float("nan"), "b", "a", "b", "a"], {}, "'y' has no value .* user 'bob'; 1 of 3"),
        (TEXTS, TEXTS, {}, "field 'x' holds text; give numbers"),
        (X, ["1,5", "2", "3", "1", "1", "1"], {}, "field 'y' holds numbers as text"),
        (X, ["a", 1, 1, 1, 1, 1], {}, "'y' has text, .*numbers, in row 0 of user 'ann'"),
        (X, np.array(["2020-01-01"] * 6, "M8[D]"), {}, "'y' holds times; give numbers"),
        (X, [pd.Timestamp("2020-01-01", tz="UTC")] * 6, {}, "'y' holds times; give numbers"),
        (X, [2**70] * 6, {}, "'y' has an integer beyond 63 bits"),
        (X, np.full(6, 2**63, np.uint64), {}, "'y' has an integer beyond 63 bits.*3 of 3 users"),
        (X, np.zeros(6, "i4,f4"), {}, "'y' has dtype .*; give numbers"),
        (None, TEXTS, {}, "'x' is a NoneType; give an array, a tensor or a list"),
        (
            [[1.0], [1.0, 2.0], *[[1.0]] * 4],
            TEXTS,
            {},
            r"'x' has arrays \[2\].* \[1\]; pad or crop it, in row 0 of user 'bob'",
        ),
        (X, TEXTS, {"classes": "no"}, "classes are 'no'; they must be a list"),
        (X, TEXTS, {"classes": ["no", "no"]}, "at least one, each once"),
        (X, [f"{text} "[: 3 - row % 2] for row, text in enumerate(TEXTS)], {}, r"str\.strip\(\)"),
        (
            X,
            TEXTS,
            {"held_out": [X] * 3},
            "held-out rows cannot be read from a list of 3; give a p",
        ),
    ],
)
def test_what_cannot_train_is_named_in_one_sentence(x, y, given, message) -> None:
    with pytest.raises(DataError, match=message):
        Population.from_arrays(x, y, IDS, **given).users.refuse_broken()


def test_a_sparse_matrix_is_refused_with_the_cure() -> None:
    sparse = pytest.importorskip("scipy.sparse")
    with pytest.raises(DataError, match=r"field 'x' is a csr_array; give its toarray\(\)"):
        Population.from_arrays(sparse.csr_array(X), TEXTS, IDS)


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (
            DataLoader(TensorDataset(torch.zeros(6, 2))),
            "the dataset cannot be read from a DataLoader; give",
        ),
        (Stream(), "from a Stream; give .* a dataset with a length"),
        (Items([(1, 2, 3)] * 6), r"an item of the dataset is a tuple of 3; it must be a pair"),
        (Items([(np.zeros(2), 0)] * 5 + [(np.zeros(3), 0)]), r"'x' has arrays \[3\].* user 'eve'"),
        (Items([{"x": 1, "y": 2}] * 5 + [{"x": 1}]), r"'y' has no value .* user 'eve'"),
        (Items([(np.zeros(2), 0)] * 5), r"has shape \(5, 2\), not 6 rows"),
        (X, "from a ndarray; give a pair"),
    ],
)
def test_datasets_that_cannot_be_read_are_one_sentence(dataset, message) -> None:
    with pytest.raises(DataError, match=message):
        Population.from_dataset(dataset, IDS).users.refuse_broken()


def test_datasets_of_users_in_a_list_have_their_places_as_ids() -> None:
    whole = TensorDataset(torch.arange(6.0)[:, None], torch.arange(6))
    parts = [torch.utils.data.Subset(whole, own) for own in ([4, 1], [], [0])]
    people = Population.from_grouped(parts, held_out=whole)
    assert (people.name, people.users.id_of(2)) == ("people: 3 users", "2")
    assert people.users.sizes.tolist() == [2, 0, 1]
    assert people.users.fields["x"].tolist() == [[4], [1], [0]]
    assert people.test["y"].tolist() == list(range(6))
    with pytest.raises(DataError, match="users are a int; they must be a table of rows by id, or"):
        Population.from_grouped(3)


FRAME = pd.DataFrame(
    {
        "who": IDS,
        "age": pd.array([30, 40, 50, 60, 70, 80], "Int64"),
        "smokes": pd.array([True, False] * 3, "boolean"),
        "weight": pd.array(X[:, 0], "Float64"),
        "mixed": pd.Series([1, True, 2.5, 0, False, 3], dtype=object),
        "label": TEXTS,
    }
)
NUMBERS = FRAME[["age", "smokes", "weight", "mixed"]].astype("f4").to_numpy()


@pytest.mark.parametrize("kind", [lambda frame: frame, pa.Table.from_pandas])
def test_a_frame_is_read_by_the_names_of_its_columns(kind) -> None:
    frame = kind(FRAME.drop(columns="mixed"))
    people = Population.from_frame(frame, y="label", user="who", name="clinic")
    assert (people.name, people.classes) == ("clinic: 3 users", ("maybe", "no", "yes"))
    x = people.users.fields["x"]
    assert x.dtype == np.float32
    np.testing.assert_array_equal(x, NUMBERS[IN_ORDER, :3])
    one = Population.from_frame(frame, y="age", user="who", x=["weight"]).users.fields
    np.testing.assert_array_equal(one["x"], X[IN_ORDER, :1])
    assert one["y"].tolist() == [30, 50, 40, 70, 60, 80]


def test_frames_and_series_are_columns_of_arrays_too() -> None:
    dummies = pd.get_dummies(FRAME.drop(columns="who"), columns=["label"])
    people = Population.from_arrays(dummies, FRAME[["label"]], FRAME["who"])
    np.testing.assert_array_equal(people.users.fields["x"][:, 4:], np.eye(3)[[1, 1, 2, 2, 0, 1]])
    np.testing.assert_array_equal(people.users.fields["x"][:, :4], NUMBERS[IN_ORDER])
    assert people.users.fields["y"].tolist() == [1, 1, 2, 2, 0, 1]
    others = dummies[[*dummies][::-1]], FRAME["label"]
    with pytest.raises(DataError, match=r"held-out columns are \['label_yes'.*they must agree"):
        Population.from_arrays(dummies, FRAME["label"], FRAME["who"], held_out=others)
    several = Population.from_frame(FRAME, x="age", y=["weight", "smokes"], user="who").users
    np.testing.assert_array_equal(several.fields["y"], NUMBERS[IN_ORDER][:, [2, 1]])
    assert several.fields["x"].shape == (6, 1)
    images = pd.DataFrame({"image": [*X.reshape(6, 2, 1)], "label": TEXTS, "who": IDS})
    x = Population.from_frame(images, x="image", y="label", user="who").users.fields["x"]
    np.testing.assert_array_equal(x, X.reshape(6, 2, 1)[IN_ORDER])


def test_a_share_of_the_users_is_held_out_with_all_their_rows() -> None:
    frame = pd.DataFrame({"a": np.arange(40.0), "who": np.arange(40) % 10, "y": ["u", "v"] * 20})
    frame["y"] = frame["y"].astype(pd.CategoricalDtype(["v", "u"]))
    made = [
        Population.from_frame(frame, y="y", user="who", held_out=0.3, seed=s) for s in (1, 1, 2)
    ]
    apart = [{*people.test[HELD_OUT_USER].tolist()} for people in made]
    assert apart[0] == apart[1] != apart[2]
    for people, users in zip(made, apart, strict=True):
        enrolled = {int(people.users.id_of(user)) for user in range(7)}
        assert enrolled | users == {*range(10)}
        assert (people.users.population, len(users)) == (7, 3)
        rows = people.users.fields["x"][:, 0].tolist() + people.test["x"][:, 0].tolist()
        assert sorted(rows) == list(range(40))
        assert people.classes == ("v", "u")
        np.testing.assert_array_equal(people.test["y"], 1 - people.test["x"][:, 0] % 2)


def test_another_frame_may_be_held_out_of_people_who_are_not_enrolled() -> None:
    others = FRAME.assign(who=[name + " smith" for name in IDS])[::-1]  # columns in any order
    people = Population.from_frame(FRAME, y="label", user="who", held_out=others[[*others][::-1]])
    np.testing.assert_array_equal(people.test["x"], NUMBERS[::-1])
    assert people.test[HELD_OUT_USER].tolist() == [name + " smith" for name in IDS[::-1]]
    unnamed = others.drop(columns="who")
    assert (
        HELD_OUT_USER
        not in Population.from_frame(FRAME, y="label", user="who", held_out=unnamed).test
    )
    with pytest.raises(DataError, match="held-out rows name 3 of the enrolled users"):
        Population.from_frame(FRAME, y="label", user="who", held_out=FRAME)


CITY = FRAME.assign(city=["york"] * 6, job=pd.Categorical([1, 2] * 3))


@pytest.mark.parametrize(
    ("frame", "given", "error", "message"),
    [
        (FRAME, {"y": "lable"}, DataError, "has no column 'lable'; did you mean 'label'"),
        (FRAME, {"user": "whom"}, DataError, "the frame has no column 'whom'; did you mean 'who'"),
        (FRAME, {"x": ["ages"]}, DataError, "has no column 'ages'; did you mean 'age'"),
        (FRAME, {"x": ["age", "label"]}, DataError, "column 'label' is an input and y or user"),
        (FRAME, {"x": []}, DataError, "has no columns; it must"),
        (X, {}, DataError, "the frame is a ndarray; it must be a table with named columns"),
        (CITY, {}, DataError, r"columns \['city', 'job'\] hold text or cat.*columns=\['city', 'jo"),
        (
            CITY.assign(city=["1,5"] * 6),
            {},
            DataError,
            "'city' holds numbers as text; .*decimal=','",
        ),
        (CITY.assign(city=["1.5"] * 6), {}, DataError, r"numbers as text; .*df\['city'\].astype"),
        (
            FRAME.assign(mixed=[None] * 6),
            {},
            DataError,
            "column 'mixed' has no value .* all 6 rows",
        ),
        (
            FRAME.assign(who=[*IDS[:5], None]),
            {},
            DataError,
            "user id number 5 is .*leave out rows without an id",
        ),
        (
            FRAME.assign(label=[*TEXTS[:5], None]),
            {},
            DataError,
            "column 'label' has no value .* in row 1 of user 'eve'; 1 of 3 users",
        ),
        (pd.concat([FRAME, FRAME], axis=1), {}, DataError, "two columns are named 'who'"),
        (
            FRAME,
            {"held_out": 0.01},
            InvalidValueError,
            "held_out is 0.01, 0 of 3 users; it must be",
        ),
        (
            FRAME.assign(who=[*IDS[:5], None]),
            {"held_out": 0.4},
            DataError,
            "user id number 5 is .*leave out rows without an id",
        ),
        (FRAME, {"held_out": 1}, InvalidValueError, "held_out is 1, 3 of 3 users; it must be"),
        (FRAME, {"held_out": FRAME[["who"]]}, DataError, "held_out has no column 'age'"),
        (FRAME.assign(x=1), {"by": ["x"], "held_out": 0.4}, DataError, "by names a column 'x'"),
        (FRAME.assign(who=X[:, 0]), {}, DataError, "user id number 0 is 0.0; ids must be"),
        (
            FRAME.assign(who=pd.array([1, 1, 2, None, 2, 1], "Int64")),
            {},
            DataError,
            "user id number 3 is .*stands for a missing id; leave out rows without an id",
        ),
    ],
)
def test_frames_that_do_not_fit_are_one_sentence(frame, given, error, message) -> None:
    with pytest.raises(error, match=message):
        Population.from_frame(
            frame, **({"y": "label", "user": "who"} | given)
        ).users.refuse_broken()


def test_fields_of_a_store_are_converted_as_those_of_a_population() -> None:
    store = from_arrays({"x": FRAME[["age", "weight"]], "flags": FRAME["smokes"]}, FRAME["who"])
    np.testing.assert_array_equal(store.fields["x"], NUMBERS[IN_ORDER][:, [0, 2]])
    assert store.fields["flags"].dtype == np.bool_
