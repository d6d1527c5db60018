"""`fedpriv export`: a released model for torch, ONNX and Hugging Face."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fedpriv.engine.adapters import merge_adapters, with_adapters
from fedpriv.errors import InvalidValueError, ModelError
from fedpriv.run.export import export_model, load_model
from fedpriv.run.simulate import run_simulation
from tests.commandline import printed, refused
from tests.run.test_released_model import Net, trained

MODULE = """
import numpy as np, torch, fedpriv
from torch import nn

def people():
    x, y = np.eye(4, dtype=np.float32).repeat(10, 0), np.arange(4).repeat(10)
    return fedpriv.Population.from_arrays(x, y, np.arange(40), held_out=(x, y))

class Saved(nn.Sequential):
    def save_pretrained(self, folder):
        folder.mkdir()
        torch.save(self.state_dict(), folder / "weights.pt")

def net():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))

def saved():
    return Saved(*net())
"""
PLAN = """
name = "exported"
rounds = 1
data = "exported_net:people"
engine = { processes = 1 }
privacy = { epsilon = 8.0, delta = 1e-2, sampling_probability = 0.5 }

[model]
name = "exported_net:{net}"
adapters = { rank = 2, layers = ["0"] }
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of files: `net` and `saved`, whose model can save itself."""
    place = tmp_path_factory.mktemp("exported")
    (place / "exported_net.py").write_text(MODULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(place)
        for net in ("net", "saved"):
            (place / f"{net}.toml").write_text(PLAN.replace("{net}", net))
            run_simulation(place / f"{net}.toml", [], place / net, resume=False)
        yield place


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))


def test_a_state_dict_of_torch_needs_nothing_else(tmp_path: Path) -> None:
    run = trained(Net(), tmp_path / "run")
    assert printed("export", run.folder, "--to", "torch").split() == [f"{run.folder}/model.pt"]
    fresh = Net(seed=1)
    fresh.load_state_dict(torch.load(run.folder / "model.pt", weights_only=True))
    for name, tensor in fresh.state_dict().items():
        assert torch.equal(tensor, run.model.state_dict()[name]), name
    sentence = refused("export", run.folder, "--to", "torch")
    assert "model.pt exists already; it is not overwritten" in sentence
    with pytest.raises(InvalidValueError, match=r"begun in Python.*load_model"):
        export_model(run.folder, "hf")


def test_a_model_that_can_save_itself_is_saved_with_plain_layers(folder: Path) -> None:
    out = export_model(folder / "saved", "hf", folder / "hf")
    found = torch.load(out / "weights.pt", weights_only=True)
    expected = load_model(folder / "saved", with_adapters(network(), 2, layers=["0"]), merge=True)
    assert found.keys() == expected.state_dict().keys()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(found[name], tensor), name


def test_an_error_of_the_other_library_is_one_of_the_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save_pretrained(*_: object) -> None:
        raise ValueError("the generation config is invalid")

    monkeypatch.setattr("exported_net.Saved.save_pretrained", save_pretrained)
    with pytest.raises(ModelError, match="ValueError: the generation config is invalid"):
        export_model(folder / "saved", "hf", folder / "other")


def test_one_that_cannot_is_told_so(folder: Path) -> None:
    with pytest.raises(InvalidValueError, match="Sequential without the method save_pretrained"):
        export_model(folder / "net", "hf")
    with pytest.raises(InvalidValueError, match="does not say how its model is made"):
        export_model(folder / "net" / "model.safetensors", "hf")
    with pytest.raises(InvalidValueError, match="holds no released model"):
        export_model(folder, "torch")


@pytest.mark.skipif(find_spec("onnx") is not None, reason="onnx is installed")
def test_without_onnx_the_command_that_installs_it_is_named(folder: Path) -> None:
    with pytest.raises(InvalidValueError, match="pip install onnx onnxscript"):
        export_model(folder / "net", "onnx")


def test_onnx_gives_the_same_outputs_for_any_number_of_rows(folder: Path) -> None:
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    out = export_model(folder / "net", "onnx", folder / "net.onnx")
    x = np.random.default_rng(0).standard_normal((7, 4)).astype(np.float32)
    adapted = load_model(folder / "net", with_adapters(network(), 2, layers=["0"]))
    (outputs,) = runtime.InferenceSession(out).run(None, {"x": x})
    expected = merge_adapters(adapted)(torch.tensor(x)).detach().numpy()
    np.testing.assert_allclose(outputs, expected, atol=1e-6)
