"""Models by name: small models from the field's papers, and any other model by import path."""

from collections.abc import Callable, Mapping

from torch import nn

from fedpriv.engine.arithmetic import generators_apart
from fedpriv.errors import ModelError
from fedpriv.support.importing import call_imported, import_function, raised_with


def softmax_regression(inputs: int = 64, classes: int = 10) -> nn.Module:
    """Return multinomial logistic regression on inputs of any shape; all weights start at 0."""
    linear = nn.Linear(inputs, classes)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return nn.Sequential(nn.Flatten(), linear)


def mlp(inputs: int = 784, hidden: int = 128, classes: int = 10) -> nn.Module:
    """Return a network with one hidden layer of ReLUs; by default it has 101,770 parameters."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, classes)
    )


def cnn(classes: int = 10) -> nn.Module:
    """Return the small CNN of the DP-SGD tutorials, for images [B, 1, 28, 28].

    It has convolutions with 16 and 32 filters, max pooling, and a hidden layer of 32 units
    (Papernot et al. 2021, "Tempered sigmoid activations"); by default it has 26,010 parameters.
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
}


def build_model(name: str, options: Mapping[str, object], seed: int) -> nn.Module:
    """Build a model from a name in `MODELS` or the import path of a function.

    `options` are the function's arguments. Initial parameters are public, and depend only on the
    seed. ModelError: the name or an option is unknown, or the function fails or returns no module.
    """
    what = f"model {name!r}"
    build = import_function(what, name, ModelError, MODELS)
    with generators_apart(seed):
        model = call_imported(what, build, options, ModelError, raised_with)
    if not isinstance(model, nn.Module):
        raise ModelError(f"{name!r} returned a {type(model).__name__}; it must return a nn.Module")
    return model
