"""Models by name, small ones of the field's papers, and any other by import path."""

from collections.abc import Callable, Mapping

import torch
from torch import nn

from fedpriv.character_models import CharacterMLP, CharacterTransformer
from fedpriv.errors import ModelError, known_names
from fedpriv.importing import call_imported, check_options, import_function, raised_with


def softmax_regression(inputs: int = 64, classes: int = 10) -> nn.Module:
    """Multinomial logistic regression from inputs of any shape, starting at zero."""
    linear = nn.Linear(inputs, classes)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return nn.Sequential(nn.Flatten(), linear)


def mlp(inputs: int = 784, hidden: int = 128, classes: int = 10) -> nn.Module:
    """One hidden layer of rectified units: 101,770 parameters by default."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, classes)
    )


def cnn(classes: int = 10) -> nn.Module:
    """The small CNN of the DP-SGD tutorials for images [B, 1, 28, 28]: 26,010 parameters.

    Papernot et al. 2021 ("Tempered sigmoid activations") give its form: two convolutions of
    16 and 32 filters, max pooling, and a hidden layer of 32 units.
    """
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, stride=2, padding=3),
        nn.ReLU(),
        nn.MaxPool2d(2, stride=1),
        nn.Conv2d(16, 32, 4, stride=2),
        nn.ReLU(),
        nn.MaxPool2d(2, stride=1),
        nn.Flatten(),
        nn.Linear(512, 32),
        nn.ReLU(),
        nn.Linear(32, classes),
    )


MODELS: Mapping[str, Callable[..., nn.Module]] = {
    "softmax": softmax_regression,
    "mlp": mlp,
    "cnn": cnn,
    "character-mlp": CharacterMLP,
    "character-transformer": CharacterTransformer,
}


def build_model(name: str, options: Mapping[str, object], seed: int) -> nn.Module:
    """Build a model with initial parameters that depend on the seed alone.

    Args:
        name: one of `MODELS`, or "package.module:function" for a function that returns a module.
        options: keyword arguments of the function.
        seed: seed of torch's generator while the model is built; initial parameters are public.

    Raises:
        ModelError: the name is unknown, an option is unknown or absent, or the function raises or
            does not return a module.
        OSError: the function raises it.
    """
    if name not in MODELS and ":" not in name:
        raise ModelError(
            f"unknown model {name!r}; {known_names(name, MODELS)}, or package.module:function"
        )
    what = f"model {name!r}"
    build = MODELS.get(name) or import_function(what, name, ModelError)
    check_options(what, build, options, ModelError)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = call_imported(what, build, options, ModelError, raised_with)
    if not isinstance(model, nn.Module):
        raise ModelError(f"{name!r} returned a {type(model).__name__}; it must return a nn.Module")
    return model
