"""Scans by our own kernels, of channels and of state spaces: in Triton's interpreter against float64, and their
registers on an H100."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from processes import printed

SUPPORT = Path(__file__).parents[1] / "support"
pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
REGISTERS = """
import json
from ahead_of_time import compiled
from fem.ops.channel_scan import channel_kernels as channels
from fem.ops.ssm import ssm_kernels as states
flags = {"HAS_A": True, "HAS_V": True, "HAS_F": True, "KEPT": True}
flags["CHUNK"] = states.CHUNK
kernels = channels.channel_kernel, channels.channel_backward_kernel
calls = [(f"{k.__name__} {ends}", k, flags | {"BLOCK": channels.BLOCK, "ENDS": ends}, 1)
         for k in kernels for ends in (True, False)]
for rank in (16, 64):
    sizes, kernels = states.sizes_of(rank), (states.ssm_kernel, states.ssm_backward_kernel)
    calls += [(f"{k.__name__} of {rank} states, {ends}", k, flags | sizes | {"ENDS": ends}, sizes["num_warps"])
              for k in kernels for ends in ([True, False] if k is states.ssm_kernel else [False])]
found, numbers = {}, ("T", "C", "W", "TOKENS", "x_row", "x_token", "x_channel")
numbers += ("a_row", "v_row", "f_row", "pieces", "length")
for name, kernel, constants, warps in calls:
    pointers = set(kernel.arg_names) - {*numbers, *constants}
    types = {pointer: "*i8" if pointer == "opens" else "*fp32" for pointer in pointers}
    found[name] = compiled(kernel, types, constants, warps)
print(json.dumps(found))
"""


@pytest.mark.parametrize(
    "scan, cases", [("channels", "all"), ("states", "few"), pytest.param("states", "all", marks=pytest.mark.slow)]
)
def test_values_gradients_and_states_are_those_of_the_definition(scan, cases):
    assert printed(str(SUPPORT / "scans_in_triton.py"), scan, cases) == "equal\n"


@pytest.mark.slow
def test_registers_of_an_h100_hold_what_a_cell_remembers():
    found = json.loads(printed("-c", REGISTERS))
    assert found.pop("ssm_backward_kernel of 64 states, False")["spilled"] <= 24
    assert all(kernel["spilled"] == 0 for kernel in found.values()), found
