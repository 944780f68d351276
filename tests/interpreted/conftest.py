"""These tests run Triton's kernels in its interpreter, which it must know before it is imported.

`TRITON_INTERPRET=1 pytest tests/interpreted` runs them alone; test_fused.py does that in a process of its own.
"""

import os

import pytest

PATCHED = "3.6"  # the Triton whose interpreter the functions below mend; another one's private names may differ

if os.environ.get("TRITON_INTERPRET") == "1":
    import numpy as np
    import triton
    import triton.language as tl
    from triton.runtime import interpreter

    def _floats(handle):
        if handle.dtype.scalar == tl.bfloat16:
            return interpreter._convert_float(handle.data, tl.bfloat16, tl.float32, None).view(np.float32)
        return handle.data

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        """3.6 multiplies the bit patterns of bf16 as integers; its own products of other types stay as they are."""
        product = np.matmul(_floats(a), _floats(b), dtype=d.data.dtype)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    _seen = set()

    def call(self, *args, **kwargs):
        """3.6 looks through the whole language again at each call of a helper; once for each module is enough."""
        module = self.fn.__globals__["__name__"]
        if module not in _seen:
            _seen.add(module)
            if module.startswith("triton"):
                interpreter._patch_lang(self.fn)
        return self.rewrite()(*args, **kwargs)

    _patch_tensor = getattr(interpreter, "_patch_lang_tensor", None)

    def patch_tensor(tensor, scope):
        """3.6 takes a loop's bounds from arrays in a way that numpy has given up."""
        _patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    if triton.__version__.startswith(PATCHED):
        interpreter._patch_lang_tensor = patch_tensor
        interpreter.InterpreterBuilder.create_dot = create_dot
        interpreter.InterpretedFunction.__call__ = call

    @pytest.fixture(autouse=True)
    def _triton_that_is_mended():
        if not triton.__version__.startswith(PATCHED):
            pytest.skip(f"mends the interpreter of Triton {PATCHED}, and {triton.__version__} is installed")

else:
    collect_ignore_glob = ["test_*.py"]
