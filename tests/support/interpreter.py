"""Triton's interpreter in half the time: it patches its language at every call of a function, which is needed once."""

from __future__ import annotations

import os

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"


def patch_the_language_once() -> None:
    import triton.language as tl
    from triton.runtime import interpreter

    if INTERPRETED:
        interpreter._patch_lang(tl.zeros.fn)  # what the functions of the language see; launches patch what kernels see
        interpreter.InterpretedFunction.__call__ = lambda self, *args, **options: self.rewrite()(*args, **options)
