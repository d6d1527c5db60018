"""Tests of the package's surface: its names, its imports and its examples."""

import doctest
import importlib
import pkgutil
import subprocess
import sys

import fedpriv.data


def test_public_names():
    assert fedpriv.data.__all__ == sorted(fedpriv.data.__all__)
    for name in fedpriv.data.__all__:
        assert hasattr(fedpriv.data, name)
    # A function of this name would hide the module from `import fedpriv.data.partition as ...`.
    assert fedpriv.data.partition is importlib.import_module("fedpriv.data.partition")


def test_import_is_light():
    check = (
        "import sys, fedpriv.data; "
        "heavy = {'torch', 'sklearn', 'scipy', 'datasets', 'pandas', 'pyarrow', 'flwr'}; "
        "sys.exit(', '.join(heavy & set(sys.modules)) or None)"
    )
    done = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_examples_in_docstrings():
    modules = [
        importlib.import_module(f"fedpriv.data.{info.name}")
        for info in pkgutil.iter_modules(fedpriv.data.__path__)
    ]
    results = [doctest.testmod(module) for module in modules]
    assert sum(result.attempted for result in results) >= 2
    assert sum(result.failed for result in results) == 0
