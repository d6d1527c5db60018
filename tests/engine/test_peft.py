"""Models of transformers with adapters of peft: random, small, of two families."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import fedpriv
from fedpriv.data.population import UserStore
from fedpriv.engine.task import Task
from fedpriv.engine.task_checks import check_task
from fedpriv.engine.transport import InProcessTransport
from fedpriv.training.request import LocalTraining
from tests.engine.everyone import alone, request_under, total_of, unclipped

# What the two libraries say of each other's calls, and of a layer that is stored transposed.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning"),
]
WORDS, LENGTH, CLASSES, USERS, EACH = 40, 8, 3, 12, 4
INPUTS = ("input_ids", "attention_mask")


def _adapted(model: nn.Module, layers: list[str]) -> nn.Module:
    peft = pytest.importorskip("peft")  # here, as loading it takes seconds
    how = peft.LoraConfig(
        task_type="SEQ_CLS", r=2, lora_alpha=8, target_modules=layers, lora_dropout=0.0
    )
    return peft.get_peft_model(model, how)


def bert() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=WORDS,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=LENGTH,
        num_labels=CLASSES,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return _adapted(transformers.BertForSequenceClassification(config), ["query", "value"])


def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=WORDS,
        n_positions=LENGTH,
        n_embd=16,
        n_layer=2,
        n_head=2,
        num_labels=CLASSES,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        attn_implementation="eager",
    )
    return _adapted(transformers.GPT2ForSequenceClassification(config), ["c_attn"])


FAMILIES = [bert, gpt2]


def texts(users: int = USERS) -> dict[str, np.ndarray]:
    """Texts of several lengths, whose class is that of their first word."""
    rng, rows = np.random.default_rng(0), users * EACH
    lengths = rng.integers(3, LENGTH + 1, rows)
    mask = (np.arange(LENGTH) < lengths[:, None]).astype(np.int64)
    words = rng.integers(2, WORDS, (rows, LENGTH)) * mask
    return {"input_ids": words, "attention_mask": mask, "y": words[:, 0] % CLASSES}


def is_adapter(name: str) -> bool:
    return "lora_" in name or "modules_to_save" in name


@pytest.mark.parametrize("make", FAMILIES)
def test_adapters_and_head_alone_are_trained(make: Callable[[], nn.Module]) -> None:
    task = Task(make(), inputs=INPUTS)
    check_task(task, {name: column[:4] for name, column in texts().items()})
    names = list(task.parameters())
    assert names
    assert all(map(is_adapter, names))
    assert any("lora_A" in name for name in names)
    assert any("modules_to_save" in name for name in names)
    only = Task(task.model, inputs=INPUTS, trained=("*lora_B*",))
    assert all("lora_B" in name for name in only.parameters())


@pytest.mark.parametrize("make", FAMILIES)
def test_users_keep_apart(make: Callable[[], nn.Module]) -> None:
    columns = texts()
    columns["input_ids"][EACH] = WORDS + 7  # no word: user 1 counts as zero
    task, store = Task(make(), inputs=INPUTS), UserStore(columns, np.arange(USERS + 1) * EACH)
    transport = InProcessTransport(task, store, torch.device("cpu"), 2**25, processes=1)
    request = request_under(task, LocalTraining(0.5, batch_size=2, epochs=1), USERS, 0.3)
    each = [alone(transport, request, user) for user in range(USERS)]
    assert [bool(one.any()) for one in each] == [user != 1 for user in range(USERS)]
    np.testing.assert_array_equal(total_of(transport, request), sum(each))


@pytest.mark.parametrize("make", FAMILIES)
def test_a_user_trains_as_in_a_plain_loop(make: Callable[[], nn.Module]) -> None:
    columns, local = texts(), LocalTraining(0.5, steps=3, momentum=0.5)
    task, store = Task(make(), inputs=INPUTS), UserStore(columns, np.arange(USERS + 1) * EACH)
    transport = InProcessTransport(task, store, torch.device("cpu"), 2**25, processes=1)
    request = request_under(task, local, USERS, 0.3)
    found = unclipped(transport, replace(request, users=np.array([5])))
    model = copy.deepcopy(task.model)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.SGD(trained.values(), lr=0.5, momentum=0.5)
    words, mask, y = (torch.from_numpy(columns[n][20:24]) for n in (*INPUTS, "y"))
    for _ in range(3):
        optimizer.zero_grad()
        scores = model(input_ids=words, attention_mask=mask).logits
        functional.cross_entropy(scores, y).backward()
        optimizer.step()
    assert found.keys() == trained.keys()
    for name, start in task.parameters().items():
        moved = trained[name].detach().numpy() - start
        np.testing.assert_allclose(found[name], moved, atol=1e-4, err_msg=name)
    assert max(float(np.abs(each).max()) for each in found.values()) > 0.05


@pytest.mark.parametrize("make", FAMILIES)
def test_a_run_releases_adapters_and_gives_the_whole_model(
    make: Callable[[], nn.Module], tmp_path: Path
) -> None:
    columns = texts()
    x, y = {name: columns[name] for name in INPUTS}, columns["y"]
    few = {name: column[:9] for name, column in x.items()}
    ids = np.arange(len(y)) // EACH
    people = fedpriv.Population.from_arrays(x, y, ids, held_out=(few, y[:9]))
    parts = {
        "B": fedpriv.Part(["*lora_B*"], fedpriv.Flat(0.3)),
        "rest": fedpriv.Part(["*"], fedpriv.Flat(0.3)),
    }
    mechanism = fedpriv.Mechanism.poisson(q=0.5, clipping=fedpriv.Grouped(parts))
    task = fedpriv.Task(make(), inputs=INPUTS)
    run = fedpriv.simulate(
        people,
        task,
        mechanism.calibrate(epsilon=8.0, delta=1e-3, rounds=2),
        local=fedpriv.SGD(0.5, epochs=1),
        out=tmp_path / "run",
        quiet=True,
    )
    assert {*run.state.model} == {*task.parameters()}
    before = dict(task.model.named_parameters())
    for name, parameter in run.model.named_parameters():
        assert torch.equal(parameter, before[name]) != is_adapter(name), name
    plain = run.model.merge_and_unload()  # peft's own way to a model without adapters
    plain.eval()
    words, mask = (torch.from_numpy(columns[name][:5]) for name in INPUTS)
    with torch.no_grad():
        adapted = run.model.eval()(input_ids=words, attention_mask=mask).logits
        merged = plain(input_ids=words, attention_mask=mask).logits
    torch.testing.assert_close(merged, adapted, rtol=1e-4, atol=1e-5)
