"""The scan of channels by our own kernels: in Triton's interpreter against float64, and its registers on an H100."""

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
from fem.ops.channel_scan.channel_kernels import BLOCK, channel_backward_kernel, channel_kernel
sizes, found = {"HAS_A": True, "HAS_V": True, "HAS_F": True, "BLOCK": BLOCK}, {}
for kernel in (channel_kernel, channel_backward_kernel):
    numbers = ("T", "C", "x_row", "x_token", "x_channel", *sizes)
    types = {name: "*fp32" for name in kernel.arg_names if name not in numbers}
    found[kernel.__name__] = compiled(kernel, types, sizes, 1)
print(json.dumps(found))
"""


def test_values_gradients_and_states_are_those_of_the_definition():
    assert printed(str(SUPPORT / "scans_in_triton.py"), "channels") == "equal\n"


@pytest.mark.slow
def test_registers_of_an_h100_hold_what_a_channel_remembers():
    found = json.loads(printed("-c", REGISTERS))
    assert all(kernel["spilled"] == 0 for kernel in found.values()), found
