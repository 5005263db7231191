"""Kernels in Triton's interpreter: around those of linear attention, of channels and state spaces, and of one token."""

import json
from pathlib import Path

import pytest
from processes import needs_triton, printed, run_cases

pytestmark = needs_triton
SCANS, MEMORY = (Path(__file__).with_name(f"{name}_cases.py") for name in ("scan", "memory"))
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
    sizes, kernels = states.cell_sizes(rank), (states.ssm_kernel, states.ssm_backward_kernel)
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
# float32's rounding; that of a score of 1,000 moves its weight; 16 bits keep 8 or 11 binary digits
LOOSE = {
    "scores of 1,000": 3e-5,
    "spans about a quarter of a nat": 2e-6,
    "bfloat16": 1e-2,
    "a bias of 16 bits": 1e-2,
    "float16": 1e-3,
    "rotation in bfloat16": 1e-2,
    "weights of 60 nats": 5e-6,
}


def test_programs_that_would_meet_on_a_card_are_found():
    run_cases(MEMORY, "test")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_linear_attention_is_read_as_the_definition_says():
    run_cases(SCANS, "test")


@pytest.mark.slow
def test_values_gradients_and_states_of_our_own_scans_are_those_of_the_definition():
    assert printed("-m", "scans_in_triton") == "equal\n"


@pytest.mark.slow
def test_registers_of_an_h100_hold_what_a_cell_of_a_scan_remembers():
    found = json.loads(printed("-c", REGISTERS))
    assert found.pop("ssm_backward_kernel of 64 states, False")["spilled"] <= 24
    assert all(kernel["spilled"] == 0 for kernel in found.values()), found


@pytest.mark.slow
def test_one_token_is_computed_as_defined():
    errors = json.loads(printed("-m", "scan_token_in_triton"))
    assert len(errors) > 50
    limits = {name: LOOSE.get(name.rpartition(": ")[2], 1e-6) for name in errors}
    assert not {name: error for name, error in errors.items() if not error < limits[name]}
