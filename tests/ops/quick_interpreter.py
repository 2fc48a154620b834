"""Triton's interpreter in about half of its time, for processes that do nothing but interpret.

Most of its time goes into types: each operation makes that of its result anew, with a tuple of constants for its shape.
Here what it makes of a shape is kept, since there are few of them. What is computed and refused stays as it is.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from triton.language import core
from triton.runtime import interpreter


def make_quick() -> None:
    """For the rest of this process."""
    _put_language_in_place_once()
    _check_no_overflow()
    _keep_shapes_of_blocks()
    _keep_shapes_of_tensors()
    _keep_dtypes()


def _put_language_in_place_once() -> None:
    """Put the interpreter's own functions in the place of Triton's language once for each module.

    It would do so at each launch and at each call of a function. Nothing in this process needs the language as it was.
    """
    put_in_place = interpreter._patch_lang
    modules: set[str] = set()

    def once(function: Callable) -> interpreter._LangPatchScope:
        if function.__module__ not in modules:
            modules.add(function.__module__)
            put_in_place(function)
        return interpreter._LangPatchScope()  # nothing to take back

    interpreter._patch_lang = once


def _check_no_overflow() -> None:
    """Sums and products of integers are not computed a second time in 64 bits, for an assertion that is off."""
    options = interpreter.interpreter_builder.options
    assert not options.debug, "assertions are on"
    interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)


def _keep_shapes_of_blocks() -> None:
    make = core.block_type.__init__
    kept: dict[tuple[int, ...], dict[str, Any]] = {}  # all attributes but two

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        key = tuple([size.value if isinstance(size, core.constexpr) else size for size in shape])
        if key not in kept or not all(type(size) is int for size in key):  # 2.0 is found as 2, and is to be refused
            make(self, element_ty, shape)
            kept[key] = {name: value for name, value in vars(self).items() if name not in ("element_ty", "name")}
        self.__dict__.update(kept[key])
        self.element_ty, self.name = element_ty, (key, element_ty)  # the name is what is hashed

    core.block_type.__init__ = init
    core.block_type.__str__ = lambda self: f"<{self.shape}, {self.element_ty}>"


def _keep_shapes_of_tensors() -> None:
    make = core.tensor.__init__
    kept: dict[int, tuple[Any, dict[str, Any]]] = {}  # by its id: the shape of a type, and all attributes but three

    def init(self: Any, handle: Any, type: Any) -> None:
        shape = type.shape if type.is_block() else None
        if id(shape) not in kept:
            make(self, handle, type)
            attributes = {name: value for name, value in vars(self).items() if name not in ("handle", "type", "dtype")}
            kept[id(shape)] = shape, attributes
        self.__dict__.update(kept[id(shape)][1])
        self.handle, self.type, self.dtype = handle, type, type.scalar

    core.tensor.__init__ = init


def _keep_dtypes() -> None:
    look_up = interpreter._get_np_dtype
    kept: dict[str, np.dtype] = {}

    def np_dtype(dtype: Any) -> np.dtype:
        scalar = dtype.scalar
        if isinstance(scalar, core.pointer_type):
            return look_up(scalar)
        if scalar.name not in kept:
            kept[scalar.name] = look_up(scalar)
        return kept[scalar.name]

    interpreter._get_np_dtype = np_dtype
