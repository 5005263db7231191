"""Our own selective scan: in Triton's interpreter against float64, and its registers on an H100."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from processes import printed

SUPPORT = Path(__file__).parents[1] / "support"
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
REGISTERS = """
import json
from ahead_of_time import compiled
from fem.ops.ssm.sequential import BLOCK, CHUNK, scan_backward_kernel, scan_kernel
found = {}
for states in (16, 64):
    sizes = {"N": states, "STATES": states, "BLOCK": BLOCK, "CHUNK": CHUNK, "HAS_OPENS": True}
    for kernel in (scan_kernel, scan_backward_kernel):
        numbers = ("T", "W", "D", "TOKENS", *sizes)
        types = {name: "*i8" if name == "opens" else "*fp32" for name in kernel.arg_names if name not in numbers}
        found[f"{kernel.__name__} of {states} states"] = compiled(kernel, types, sizes, 4)
print(json.dumps(found))
"""


@needs_triton
@pytest.mark.slow
def test_documents_masks_and_spikes_are_read_as_the_definition_says():
    assert printed(str(SUPPORT / "scans_in_triton.py"), "states") == "equal\n"


@needs_triton
@pytest.mark.slow
def test_registers_of_an_h100_hold_the_states():
    found = json.loads(printed("-c", REGISTERS))
    assert all(kernel["spilled"] == 0 for kernel in found.values()), found
