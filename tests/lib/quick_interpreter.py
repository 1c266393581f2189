"""Makes Triton's interpreter faster. Import it before kernels run in the interpreter.

- The interpreter patches the language's functions while a kernel runs, and searches for all of them
  again at each call of a device function. One search per launch is enough.
- It checks each sum and product of integers for overflow, in 64 bits. A GPU does not.
- It computes the names, sizes and numpy types of a block's type again for each value.
- numpy stores bf16 matrices as 16-bit integers. They are multiplied as the values that they encode.
"""

import dataclasses
import functools
import math

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_patch_lang, _launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
_patched: set[int] = set()
"""Globals of functions that are already patched in the current launch."""


def _patch_once(fn):
    if id(fn.__globals__) in _patched:
        return None
    _patched.add(id(fn.__globals__))
    return _patch_lang(fn)


@functools.wraps(_launch)
def _launch_anew(executor, *args, **kwargs):
    _patched.clear()
    return _launch(executor, *args, **kwargs)


interpreter._patch_lang = _patch_once
interpreter.GridExecutor.__call__ = _launch_anew


_dot = interpreter.InterpreterBuilder.create_dot


def _widened(handle):
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    wide = (handle.data.astype(np.uint32) << 16).view(np.float32)
    return interpreter.TensorHandle(wide, tl.float32)


def _dot_of_any(builder, a, b, *args):
    return _dot(builder, _widened(a), _widened(b), *args)


interpreter.InterpreterBuilder.create_dot = _dot_of_any


interpreter.interpreter_builder.options = dataclasses.replace(
    interpreter.interpreter_builder.options, sanitize_overflow=False
)


# ---- types, which are made for each value ------------------------------------------------------

_shapes: dict[tuple[int, ...], tuple[tl.tuple, tl.constexpr]] = {}
_types: dict[tuple[tuple[int, ...], str], tuple[tl.tuple, int, str]] = {}
_numpy_types: dict[str, np.dtype] = {}
_make_block_type, _numpy_type = tl.block_type.__init__, interpreter._get_np_dtype
_equals = tl.dtype.__eq__


def _tensor(self, handle, type):
    """Make a value; its shape is taken from a cache of few shapes."""
    shape = tuple(type.shape.values) if type.is_block() else ()
    known = _shapes.get(shape)
    if known is None:
        constants = tl.tuple([tl.constexpr(size) for size in shape])
        known = _shapes[shape] = constants, tl.constexpr(math.prod(shape))
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = known


def _block_type(self, element_ty, shape):
    """Make a type; shapes that were checked before are not checked again."""
    sizes = shape.values if isinstance(shape, tl.tuple) else shape
    if not all(type(size) is int for size in sizes):
        return _make_block_type(self, element_ty, shape)
    key = (tuple(sizes), str(element_ty))
    if key not in _types:
        _make_block_type(self, element_ty, shape)
        _types[key] = self.shape, self.numel, self.name
    self.element_ty = element_ty
    self.shape, self.numel, self.name = _types[key]
    return None


def _known_numpy_type(dtype):
    element = dtype.scalar
    if element.is_ptr():
        return _numpy_type(element)
    if (known := _numpy_types.get(element.name)) is None:
        known = _numpy_types[element.name] = _numpy_type(element)
    return known


def _is_same(self, other):
    return self is other or _equals(self, other)


tl.tensor.__init__ = _tensor
tl.block_type.__init__ = _block_type
tl.dtype.__eq__ = _is_same
interpreter._get_np_dtype = _known_numpy_type
