"""Values as short texts, and no code of the user's run for them."""

from __future__ import annotations

import enum
import sys
from collections import OrderedDict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from instep.guard import texts


class Angry(type):
    """A class whose every word is code of the user's."""

    def _raise(cls, *_: Any) -> Any:
        raise AssertionError("code of the user's was run")

    __hash__ = __eq__ = __instancecheck__ = __subclasscheck__ = __getattribute__ = _raise


def rage(self: Any, *args: Any) -> Any:
    raise AssertionError("code of the user's was run")


NAMES: tuple[str, ...] = (
    "__repr__",
    "__str__",
    "__len__",
    "__getattr__",
    "__getattribute__",
    "__bool__",
    "__eq__",
    "__hash__",
)
NAMES += ("__iter__", "__format__", "__float__", "__int__", "__index__", "__getitem__", "__contains__")
Quiet = type("Quiet", (), dict.fromkeys(NAMES, rage) | {"__class__": property(rage), "shape": property(rage)})
Loud = Angry("Loud", (), {})


class MyTensor(torch.Tensor):
    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("code of the user's was run")


class MyList(list[int]):
    __len__ = __iter__ = __repr__ = rage


class MyInt(int):
    __repr__ = bit_length = rage


class Stage(enum.Enum):
    TRAIN = 1


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "None"),
        (True, "True"),
        (-3, "-3"),
        (10**400, "int of many digits"),
        (float("nan"), "nan"),
        ("it's", '"it\'s"'),
        (Path("a/b"), "'a/b'"),
        ([], "[]"),
        ([1, 2.5, "x"], "[1, 2.5, 'x']"),
        ((1,), "(1,)"),
        (((1, 2), [3]), "((1, 2), [3])"),
        (list(range(25)), "list of 25"),
        ({3}, "{3}"),
        (deque(range(9)), "deque of 9"),
        ({"loss": 1, "acc": 2}, "dict of 2: 'loss', 'acc'"),
        ({}, "dict of 0"),
        (OrderedDict(a=1), "OrderedDict"),
        (torch.tensor(3.5), "3.5 (float32)"),
        (torch.tensor([True]), "True (bool[1])"),
        (torch.nn.Parameter(torch.ones(2, 3)), "float32 [2, 3]"),
        (torch.ones(2, 3, device="meta"), "float32 [2, 3] on meta"),
        (torch.ones(1, device="meta"), "float32 [1] on meta"),
        (torch.Size([2, 3]), "[2, 3]"),
        (torch.float16, "torch.float16"),
        (torch.device("cpu"), "cpu"),
        (np.float64(2.5), "2.5"),
        (np.ones((2, 2)), "array float64 [2, 2]"),
        (Stage.TRAIN, "Stage.TRAIN"),
    ],
)
def test_text_of(value: object, text: str) -> None:
    assert texts.text_of(value) == text


def test_nothing_of_the_users_is_run() -> None:
    assert texts.text_of(Quiet()) == "Quiet"
    assert texts.text_of(Loud()) == "Loud"
    assert texts.text_of(MyList([1])) == "MyList"
    assert texts.text_of(MyInt(3)) == "MyInt"
    assert texts.text_of([Quiet(), Loud()]) == "list of 2"
    assert texts.text_of({"a": Quiet()}) == "dict of 1: 'a'"


def test_long_values_are_cut() -> None:
    assert len(texts.text_of("x" * 10_000)) == 80
    assert len(texts.text_of({"y" * 50: 1, "z" * 50: 2})) == 80


def test_a_tensor_of_the_users_own_class_is_not_asked() -> None:
    assert texts.text_of(torch.ones(1).as_subclass(MyTensor)) == "MyTensor"


class Config:
    depth: int

    def __init__(self) -> None:
        self.skip = 7
        self.unused = 8
        self.inner = Config.__new__(Config)
        self.inner.depth = 9
        self.anger = Quiet()


LIMIT = 5


def of_here(look: Any) -> Any:
    """What `look` makes of the frame that calls this."""
    return look(sys._getframe(1))


def test_variables_that_the_function_uses() -> None:
    def work(self: Any, batch: Any) -> Any:
        count, hidden = 3, Loud()
        if batch["x"] and self.skip > LIMIT and self.inner.depth:
            return of_here(texts.variables)
        return hidden, count

    values = work(Config(), {"x": torch.tensor(2), "y": 1})
    wanted = {"count": "3", "hidden": "Loud", "batch": "dict of 2: 'x', 'y'", "batch['x']": "2 (int64)"}
    wanted |= {"self": "Config", "self.skip": "7", "self.inner": "Config", "self.inner.depth": "9", "LIMIT": "5"}
    assert values == wanted


def test_variables_are_not_kept() -> None:
    """Before Python 3.13 a look at a frame's variables would keep them as long as the function runs."""
    import weakref

    def work() -> Any:  # without an assert: pytest would make it use locals()
        tensor = torch.ones(3)
        seen = weakref.ref(tensor)
        values = of_here(texts.variables)
        del tensor
        return values, seen()

    values, seen = work()
    assert values["tensor"] == "float32 [3]"
    assert seen is None


def test_a_function_that_holds_its_own_variables_keeps_them() -> None:
    def work() -> Any:
        first = 1
        mine = locals()
        of_here(texts.variables)
        return mine, first

    assert work()[0]["first"] == 1


def test_a_module_tells_what_it_uses() -> None:
    space = {"of_here": of_here, "variables": texts.variables, "unused": 3, "__name__": "x"}
    code = "import os\ncount = 4\ndef f(): pass\nif count > 3: found = of_here(variables)"
    exec(compile(code, "x.py", "exec"), space)
    assert space["found"] == {"count": "4"}


def test_messages() -> None:
    class Quoting(Exception):
        def __str__(self) -> Any:
            raise AssertionError

    class Plain(ValueError):
        pass

    assert texts.message(ValueError("bad")) == "bad"
    assert texts.message(Plain("bad")) == "bad"
    assert texts.message(OSError(2, "none", "f")) == "[Errno 2] none: 'f'"
    assert texts.message(KeyError("k")) == "'k'"
    assert texts.message(Quoting("one", 2)) == "'one', 2"
    assert texts.message(ValueError(Quiet())) == "Quiet"
    assert len(texts.message(ValueError("x" * 10_000))) == 500
    assert texts.class_name(Plain).endswith("test_texts.test_messages.<locals>.Plain")
    assert texts.class_name(ValueError) == "ValueError"
