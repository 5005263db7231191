"""The arithmetic of an NVIDIA card in Triton's interpreter, which has NumPy's: as inexact as PTX says it may be.

* 2^x is off by 2^-22 of the result, and e^x by the rounding of x / log 2 besides;
* the fast logarithm is off by 2^-22 of log_2 x, and between 1/2 and 2 by 2^-22; that of 1 is 0;
* a division multiplies by a reciprocal that is off by 2^-23 of itself; 1 / sqrt(x) is off by 2^-22.9;
* the fast ones take what is below 2^-126 for 0 on either side, and the reciprocal of what is above 2^126;
* a product and a sum are one instruction, which rounds once;
* products of matrices in TF32 read 10 bits of each number.

An error has a random size and sign, which depend on the number alone, as on a card.
"""

from __future__ import annotations

import numpy as np
from numpy import ndarray
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, TensorHandle, interpreter_builder

FAST = {"exponential", "logarithm", "power_of_2", "quotient"}  # of `triton_math`, by the card's own instructions
LOG2_E, LOG_2 = np.float32(1.442695041), np.float32(0.6931471806)
SMALLEST, LARGEST = 2.0**-126, 2.0**126
PRECISION = interpreter._ir.INPUT_PRECISION


def error(x: ndarray, size: float) -> ndarray:
    """A number between -size and size for each of x, the same for equal ones; 0 for powers of 2."""
    bits = x.view(np.uint32).astype(np.uint64)
    mixed = (bits ^ (bits >> 15)) * np.uint64(0x9E3779B97F4A7C15)
    share = (mixed >> np.uint64(40)).astype(np.float64) * 2.0**-23 - 1.0
    return np.where(bits & np.uint64(0x7FFFFF), share * size, 0.0)


def flushed(x: ndarray, fast: bool) -> ndarray:
    return np.where(np.abs(x) < SMALLEST, np.copysign(np.float32(0), x), x) if fast else x


def power_of_2(x: ndarray, fast: bool) -> ndarray:
    off = np.where(x == np.floor(x), 0.0, error(x, 2.0**-22))
    return flushed((np.exp2(x.astype(np.float64)) * (1.0 + off)).astype(np.float32), fast)


def logarithm_of_2(x: ndarray) -> ndarray:
    x = flushed(x, True)
    exact = np.log2(x.astype(np.float64))
    return (exact + error(x, 2.0**-22) * np.maximum(1.0, np.abs(exact))).astype(np.float32)


def quotient(x: ndarray, y: ndarray, fast: bool) -> ndarray:
    x, y = flushed(x, fast), flushed(y, fast)
    reciprocal = (1.0 / y.astype(np.float64)) * (1.0 + error(y, 2.0**-23))
    if fast:
        reciprocal = np.where(np.abs(y) > LARGEST, 0.0, reciprocal)
    return flushed((x * reciprocal).astype(np.float32), fast)


def root(x: ndarray) -> ndarray:
    return ((1.0 + error(x, 2.0**-22.9)) / np.sqrt(x.astype(np.float64))).astype(np.float32)


def tf32(x: ndarray) -> ndarray:
    return ((x.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)


def in_tf32(left: ndarray, right: ndarray, threefold: bool) -> ndarray:
    """left right; threefold: of what each number is off by, too."""
    high, other = tf32(left), tf32(right)
    found = np.matmul(high, other)
    if threefold:
        found += np.matmul(tf32(left - high), other) + np.matmul(high, tf32(right - other))
    return found


def of_floats(*handles: TensorHandle) -> bool:
    return all(handle.data.dtype == np.float32 for handle in handles)


def imitate() -> None:
    """Compute so from here on."""
    builder, called, fast = type(interpreter_builder), InterpretedFunction.__call__, 0
    plain = {name: getattr(builder, f"create_{name}") for name in ("log", "fmul", "fadd", "fsub", "dot")}

    def marked(self, *arguments, **keywords):
        nonlocal fast
        fast += self.fn.__name__ in FAST
        try:
            return called(self, *arguments, **keywords)
        finally:
            fast -= self.fn.__name__ in FAST

    def imitated(name, function):
        usual = getattr(builder, f"create_{name}")

        def create(self, *handles):
            if not of_floats(*handles):
                return usual(self, *handles)
            return TensorHandle(function(*(handle.data for handle in handles), bool(fast)), handles[0].dtype.scalar)

        setattr(builder, f"create_{name}", create)

    def log(self, x):
        if not (fast and of_floats(x)):
            return plain["log"](self, x)
        factors = logarithm_of_2(x.data), LOG_2
        found = TensorHandle(factors[0] * LOG_2, x.dtype.scalar)
        found.factors = factors
        return found

    def multiplied(self, x, y):
        found = plain["fmul"](self, x, y)
        if of_floats(x, y):
            found.factors = x.data, y.data
        return found

    def added(name, sign):
        def create(self, x, y):
            pairs = ((x, y, 1.0, sign), (y, x, sign, 1.0)) if of_floats(x, y) else ()
            for product, other, ours, theirs in pairs:
                if hasattr(product, "factors"):
                    left, right = (factor.astype(np.float64) for factor in product.factors)
                    return TensorHandle((ours * left * right + theirs * other.data).astype(np.float32), x.dtype.scalar)
            return plain[name](self, x, y)

        return create

    def product(self, left, right, total, precision, *rest):
        if precision not in (PRECISION.TF32, PRECISION.TF32x3) or not of_floats(left, right):
            return plain["dot"](self, left, right, total, precision, *rest)
        found = in_tf32(left.data, right.data, precision == PRECISION.TF32x3)
        return TensorHandle(found + total.data, total.dtype.scalar)

    InterpretedFunction.__call__ = marked
    imitated("exp", lambda x, fast: power_of_2(x * LOG2_E, fast))
    imitated("exp2", power_of_2)
    imitated("fdiv", quotient)
    imitated("rsqrt", lambda x, fast: root(x))
    builder.create_log, builder.create_fmul, builder.create_dot = log, multiplied, product
    builder.create_fadd, builder.create_fsub = added("fadd", 1.0), added("fsub", -1.0)
