"""Fingerprints of Python values, by which what was measured before is known again."""

import copyreg
import dis
import hashlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CodeType,
    EllipsisType,
    FunctionType,
    MappingProxyType,
    ModuleType,
    NoneType,
)
from typing import Any

from torch import Tensor, uint8
from torch.nn import Module

_PLAIN = (float, complex, str, bytes, bool, NoneType, EllipsisType)
_SHORT = 32  # bits that a hash of text has more than
_INSTALLED = {"site-packages", "dist-packages"}  # folders of installed packages


def fingerprint(*values: object) -> str:
    """SHA-256 of what values do; where nothing changed it is the same in another process.

    Compared are numbers and text; the numbers of arrays and tensors, and whether these are trained;
    what collections hold; the class of an object, and its attributes as a copy would have them, so
    that of a model all layers, parameters and buffers count. Of functions and classes it is the
    code, with defaults, and what the code closes over or names as globals; of the class of an
    object not what makes the object, which is there already. What comes with Python, fedpriv or an
    installed package counts by its name, and so does what a function imports when it is called.

    A value that cannot be told, such as a lock or an open file, has another fingerprint each time.
    No address in memory counts, nor where in a file code stands. Code must not name users' data, as
    a guess at them could be tested against a fingerprint.
    """
    walk = _Walk({})
    try:
        walk.add(values)
    except RecursionError:  # they hold each other too deeply
        walk.unknown()
    return walk.digest.hexdigest()


class _Walk:
    """One pass over values and all that they hold; what is met again counts by its number."""

    def __init__(self, seen: dict[int, tuple[int, object]]) -> None:
        self.digest = hashlib.sha256()
        self.seen = seen  # by id; values are kept, so that no id is given to another

    def add(self, value: Any) -> None:
        """Let a value count."""
        kind = type(value)
        if kind is int:
            self._say("int", f"{value:x}")
        elif kind in _PLAIN:
            self._say(kind.__name__, repr(value))
        elif kind is tuple:
            self._collection("tuple", value)
        elif id(value) in self.seen:
            self._say("again", self.seen[id(value)][0])
        else:
            self.seen[id(value)] = len(self.seen), value
            self._found(value)

    def _say(self, *words: object) -> None:
        for word in words:
            raw = str(word).encode()
            self.digest.update(b"%d:%b" % (len(raw), raw))

    def _collection(self, kind: str, items: Iterable[object]) -> None:
        listed = list(items)
        self._say(kind, len(listed))
        for item in listed:
            self.add(item)

    def _found(self, value: Any) -> None:
        kind = type(value)
        if isinstance(value, ModuleType):
            self._say("module", value.__name__)
        elif _is_installed(value):
            self._say("installed", value.__module__, value.__qualname__)
        elif kind in (set, frozenset):
            self._set(value)
        elif kind is list:
            self._collection("list", value)
        elif kind in (dict, MappingProxyType):
            items = [(name, held) for name, held in value.items() if not _is_hash(name, held)]
            self._collection("dict", items)
        elif tell := next((tell for each, tell in _KINDS.items() if isinstance(value, each)), None):
            tell(self, value)
        else:
            self._object(value)

    def _set(self, value: set[object] | frozenset[object]) -> None:
        walks = []
        for item in value:  # in an order that the process decides
            walks.append(_Walk(self.seen if type(item) in _PLAIN else dict(self.seen)))
            walks[-1].add(item)
        self._say("set", *sorted(walk.digest.hexdigest() for walk in walks))

    def _tensor(self, value: Tensor) -> None:
        self._say("tensor", type(value).__qualname__, value.dtype, [*value.shape])
        self._say(value.requires_grad)
        try:
            numbers = value.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
            self.digest.update(numbers.flatten().view(uint8).numpy().data)
        except (RuntimeError, TypeError):  # such as a sparse one
            self.unknown()

    def _code(self, code: CodeType) -> None:
        self._say("code", code.co_code.hex(), code.co_exceptiontable.hex(), code.co_flags)
        self._say(code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount)
        self._collection("names", (*code.co_names, *code.co_varnames))
        self._collection("names", (*code.co_freevars, *code.co_cellvars))
        self._collection("constants", code.co_consts)

    def _builtin(self, function: BuiltinFunctionType) -> None:
        if isinstance(function.__self__, ModuleType | type | None):
            self._say("builtin", function.__module__, function.__qualname__)
        else:
            self._object(function)

    def _property(self, value: property) -> None:
        self._collection("property", (value.fget, value.fset, value.fdel))

    def _method(self, value: Any) -> None:
        self._collection("method", (type(value), value.__func__))

    def _function(self, function: FunctionType) -> None:
        self._say("function")
        self.add((function.__code__, function.__defaults__, function.__kwdefaults__))
        self.add(vars(function))
        for cell in function.__closure__ or ():
            try:
                held = cell.cell_contents
            except ValueError:
                held = "nothing yet"
            self.add(held)
        self._collection("globals", _globals_of(function).items())

    def _class(self, kind: type, *, made: bool = False) -> None:
        """A class, without its constructor if the object that it `made` counts."""
        self._say("class", kind.__qualname__)
        self.add((type(kind), kind.__bases__))
        for name, value in vars(kind).items():
            does = callable(value) or isinstance(value, property | staticmethod | classmethod)
            own = not (name.startswith("__") and name.endswith("__")) and name != "_abc_impl"
            if (own or does) and not (made and name == "__init__"):
                self._say(name)
                self.add(value)

    def _kind_of(self, value: object) -> None:
        kind = type(value)
        self._say("object", kind.__module__, kind.__qualname__)
        if id(kind) not in self.seen and not _is_installed(kind):
            self.seen[id(kind)] = len(self.seen), kind
            self._class(kind, made=True)

    def _model(self, model: Module) -> None:
        """A module by its attributes, since those that are parametrised refuse pickle."""
        self._kind_of(model)
        self.add(vars(model))

    def _object(self, value: object) -> None:
        """An object by what pickle and copy take of it."""
        kind = type(value)
        self._kind_of(value)
        try:
            reduce = copyreg.dispatch_table.get(kind)
            parts = reduce(value) if reduce else value.__reduce_ex__(4)
            wrapped = getattr(value, "__wrapped__", None)  # by a cache or another decorator
        except Exception:  # whatever keeps it from being copied
            self.unknown()
            return
        self.add(wrapped)
        for part in (parts,) if isinstance(parts, str) else parts:
            self.add(list(part) if isinstance(part, Iterator) else part)

    def unknown(self) -> None:
        """Let something count that cannot be told."""
        self.digest.update(os.urandom(32))


_KINDS: Mapping[type, Callable[[_Walk, Any], None]] = {
    Module: _Walk._model,
    Tensor: _Walk._tensor,
    FunctionType: _Walk._function,
    BuiltinFunctionType: _Walk._builtin,
    CodeType: _Walk._code,
    type: _Walk._class,
    property: _Walk._property,
    staticmethod: _Walk._method,
    classmethod: _Walk._method,
}


def _is_hash(name: object, value: object) -> bool:
    """Whether it is a `hash`, which the process decides; transformers keeps some."""
    named = isinstance(name, str) and "hash" in name
    return named and type(value) is int and value.bit_length() > _SHORT


def _globals_of(function: FunctionType) -> dict[str, object]:
    """What the code of a function names outside of it, by name; of own modules what it reads."""
    found, codes = dict[str, object](), [function.__code__]
    while codes:
        code = codes.pop()
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
        name = ""
        for step in dis.get_instructions(code):
            module = found.get(name)
            if step.opname == "EXTENDED_ARG":
                continue
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                name = step.argval
                if name in function.__globals__:  # else it is built in
                    found[name] = function.__globals__[name]
            elif step.opname in ("LOAD_ATTR", "LOAD_METHOD") and _is_own_module(module):
                name = f"{name}.{step.argval}"
                found[name] = getattr(module, step.argval, None)
            else:
                name = ""
    return found


def _is_own_module(value: object) -> bool:
    return isinstance(value, ModuleType) and not _comes_installed(value.__name__)


def _comes_installed(module: str) -> bool:
    """Whether a module comes with Python, fedpriv or an installed package."""
    top = module.partition(".")[0]
    files = [getattr(sys.modules.get(name), "__file__", None) for name in (top, module)]
    installed = any(_INSTALLED & {*Path(file).parts} for file in files if file)
    return installed or top in {*sys.stdlib_module_names, "fedpriv"}


def _is_installed(value: object) -> bool:
    """Whether it is a function or class that an installed module has under its name."""
    if not isinstance(value, type | FunctionType | BuiltinFunctionType):
        return False
    module = value.__module__
    if not isinstance(module, str) or not _comes_installed(module):  # of what is built in, None
        return False
    found: object = sys.modules.get(module)
    for part in value.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is value
