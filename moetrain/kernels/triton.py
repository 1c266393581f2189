"""Triton where it exists; elsewhere, names that let the kernel files be imported.

Triton has wheels for Linux alone. On other systems every kernel runs as its plain-torch reference:
``backend="auto"`` takes that on a CPU anyway, and the fast paths take CUDA tensors only. Import
``triton``, ``tl`` and ``TensorDescriptor`` from here and never from triton itself.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor

    INTERPRETED: bool
    KNOBS: Any
else:
    try:
        import triton
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise

        class _Absent:
            """Any attribute is absent too; as a decorator it returns the function."""

            def __getattr__(self, name: str) -> "_Absent":
                return self

            def __call__(self, *args: Any, **settings: Any) -> Any:
                return args[0] if args else self

        triton = tl = TensorDescriptor = KNOBS = _Absent()
        INTERPRETED = False
    else:
        import triton.language as tl
        from triton.tools.tensor_descriptor import TensorDescriptor

        KNOBS = triton.knobs
        INTERPRETED = KNOBS.runtime.interpret

__all__ = ["INTERPRETED", "KNOBS", "TensorDescriptor", "tl", "triton"]
