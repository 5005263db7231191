"""The library on the card that is not there: `make card`. No value is checked, as no kernel computes (docs/card.md)."""

from __future__ import annotations

import json
import re
from itertools import product

import card
import measure
import pytest
import torch
from measure import BFLOAT16, FUSED, LAYERS, MODES, RECORD, REGISTERS, build, decode, prepared, registers, train
from situations import SITUATIONS
from torch._inductor.utils import run_and_get_code
from torch.utils.checkpoint import checkpoint
from transformers import BertConfig, BertModel, DynamicCache, LlamaConfig, LlamaForCausalLM
from triton.compiler import CompiledKernel

from fem import PRIORS, FreeEnergyMixerConfig
from fem.doctor.card import steps
from fem.functional import softmax_read
from fem.models import FEMConfig, FEMForCausalLM, replace_attention
from fem.ops.common.launch import OPTIONS, Launched
from fem.ops.common.token_kernels import launch_softplus
from fem.ops.softmax.fused import bounded_attention

card.pose()
KNOWN = json.loads(RECORD.read_text())
RECORDED = {(row["layer"], row["mode"]): row for row in KNOWN["after"]}
COUNTED = torch.__version__ == KNOWN["torch"]  # another one's inductor and Triton launch another number of kernels
FULL = card.SM == 90  # on other cards: where the choice of a kernel, its code or its shared memory differs
full = pytest.mark.skipif(not FULL, reason="chosen and compiled as on sm_90")
bfloat16 = pytest.mark.skipif(card.SM < 80, reason="layers are fused in bfloat16, which this card does not multiply")


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def launches_take_the_code_that_triton_would_take(monkeypatch):
    """In every case, of every kernel of the library."""
    launch, take, taken = Launched.launch, CompiledKernel.__getitem__, []

    def checked(self, grid, *arguments, **constants):
        taken.clear()
        launch(self, grid, *arguments, **constants)
        wanted = self.fn.warmup(*arguments, grid=grid, **constants, **OPTIONS)
        assert all(code is wanted for code in taken), f"{self.fn.__name__} was launched by code of another call"

    monkeypatch.setattr(Launched, "launch", checked)
    monkeypatch.setattr(CompiledKernel, "__getitem__", lambda code, grid: taken.append(code) or take(code, grid))


def test_a_kernel_of_other_arguments_is_launched_by_other_code():
    numbers = torch.ones(64, device="cuda")
    for first, count in product((0, 1), (1, 16, 17)):
        launch_softplus(numbers[first : first + count], 0.0)
        launch_softplus(numbers.bfloat16()[first : first + count], 0.0)


def through(mode: str, layer):
    return torch.compile(layer) if mode == "compiled" else layer


def tokens(rows: int = 2, time: int = 256, width: int = 256) -> torch.Tensor:
    return torch.randn(rows, time, width, device="cuda", requires_grad=True)


@bfloat16
@pytest.mark.parametrize("name, mode", [
    (name, mode) for name, mode in RECORDED if FULL or ("eager" in mode and "mamba" not in name) or name == "softmax"
])  # fmt: skip
def test_a_train_step_takes_no_more_than_is_recorded(name, mode):
    layer, call, x = prepared(name, mode)
    row, _ = train(call, x)
    wanted = RECORDED[name, mode]
    row |= {} if mode == BFLOAT16 else decode(layer, mode)
    # The allocator rounds by what ran before; on another card flash attention may split its keys: a kernel more.
    more = {"kept MiB": 2} if FULL else {"kept MiB": 2, "forward": 1, "token": 1}
    if not COUNTED:
        row = {what: got for what, got in row.items() if "waits" in what}
    above = {what: (got, wanted[what]) for what, got in row.items() if got > wanted[what] + more.get(what, 0)}
    assert not above, f"{name}, {mode}: more than research/results/checks/card.json holds (got, recorded): {above}"


def train_step(call, x: torch.Tensor) -> None:
    """One in bfloat16 that allocates its gradients."""
    measure.forget(call, x)
    y = measure.step(call, x)
    y.backward(torch.ones_like(y))


ON_ANY_CARD = [(name, mode) for name in FUSED for mode in MODES if FULL or mode == "eager"]


@bfloat16
@pytest.mark.parametrize("name, mode", ON_ANY_CARD + [(name, "eager") for name in LAYERS if name not in FUSED] * FULL)
def test_a_train_step_can_be_captured(name, mode):
    """Nothing waits in it. That of a fused layer is one graph of torch.compile, too."""
    layer, x = build(256, 4, **LAYERS[name]), tokens()
    call = torch.compile(layer, fullgraph=True) if mode == "compiled" else layer
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(3):
            train_step(call, x)
    with torch.cuda.graph(torch.cuda.CUDAGraph()), card.record() as events:
        train_step(call, x)
    assert not events.waits, events.summary()
    if name in FUSED:
        assert events.count("triton rotate_kernel") == 2, "the layer was not read by the fused kernels"


@full
@pytest.mark.parametrize("name", FUSED)
def test_a_train_step_of_a_fused_layer_replays_two_graphs(name):
    """With mode="reduce-overhead": one forward, one backward, and no kernel of the layer beside them."""
    layer, x = build(256, 4, **LAYERS[name]), tokens()
    call = torch.compile(layer, mode="reduce-overhead", fullgraph=True)
    for _ in range(3):
        train_step(call, x)
    with card.record() as events:
        train_step(call, x)
    assert events.count("graph launched") == 2, events.summary()
    assert not [event for event in events if event.startswith(("triton", "matmul"))], events.summary()


@full
@pytest.mark.parametrize(
    "prior, marks", [*product(("softmax", "gla"), ("segment_ids", "attention_mask")), *product(PRIORS, [None])]
)
def test_a_train_step_of_a_model_replays_two_graphs(prior, marks):
    """The same, where gradients of several steps are added in tensors that stood before."""
    sizes = {"vocab_size": 64, "hidden_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4, "use_cache": False}
    model = FEMForCausalLM(FEMConfig(prior_type=prior, **sizes)).cuda()
    ids, call = torch.zeros(2, 256, dtype=torch.long, device="cuda"), torch.compile(model, mode="reduce-overhead")
    given = {} if marks is None else {marks: (torch.arange(256, device="cuda") // 100).clamp_max(1).expand(2, -1)}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for _ in range(3):
        with torch.autocast("cuda", torch.bfloat16), card.record() as events:
            call(ids, labels=ids, **given).loss.backward()
    assert events.count("graph launched") == 2, events.summary()
    assert not [event for event in events if event.startswith(("triton", "matmul"))], events.summary()


@bfloat16
@pytest.mark.parametrize("values", REGISTERS)
def test_no_kernel_that_always_runs_spills(values):
    """Those of doubtful entries end at once where there are none; they may spill six numbers. Cos and sin in float64
    have a table for large angles; of a token's conditioner two numbers are spilt, and on sm_100 of its backward."""
    found = registers(values)
    assert len(found) >= 9
    assert not spilt(found), found


@pytest.mark.parametrize("prior", [prior for prior in PRIORS if prior != "softmax"])
def test_no_kernel_of_a_scans_token_spills(prior):
    found = card.registers(lambda: decode(build(prior_type=prior), "eager"))
    kernels = found.keys() - {"rotate_token_kernel"}
    reads = [name for name in kernels if name.endswith(("token_kernel", "channel_kernel", "ssm_kernel"))]
    assert len(reads) == 1 + (prior == "mamba_interactive")
    assert not spilt(found), found


def spilt(found: dict[str, tuple[int, int]]) -> dict[str, int]:
    """Bytes of the kernels that spill more than they may."""
    may = {"rotate_token_kernel": 48, "angles_kernel": 48, "condition_kernel": 8, "state_backward_kernel": 8}
    allowed = may | {name: 24 for name in found if name.startswith("doubtful")}
    return {name: bytes for name, (_, bytes) in found.items() if bytes > allowed.get(name, 0)}


@pytest.mark.parametrize("fields, marks, mode", [
    ({"window": 64}, "none", "eager"),
    ({"n_kv_head": 2}, "documents", "eager"),
    *[({}, "padding", "compiled"), ({"window": 64}, "documents", "compiled")] * FULL,
])  # fmt: skip
def test_softmax_of_every_length_meets_no_recompile_limit(fields, marks, mode):
    call = through(mode, build(256, 4, **fields))
    for rows, time in ((2, 256), (1, 192), (3, 64), (2, 1))[: 4 if FULL else 3]:
        x = tokens(rows, time)
        given = {}
        if marks == "padding":
            given = {"attention_mask": torch.ones(rows, time, dtype=torch.bool, device="cuda").tril(time // 2)}
        if marks == "documents":
            given = {"segment_ids": torch.arange(time, device="cuda").div(100, rounding_mode="floor").expand(rows, -1)}
        train(call, x, warm=0, **given)
        with torch.no_grad():
            call(x, **given)


@full
@pytest.mark.parametrize("fields", [{}, {"free_share": 0.5}, {"prior_type": "gla"}])
def test_no_cuda_graph_is_made_of_a_part_of_a_layer(fields):
    """Inductor leaves out pieces of a concatenation that lie in another part (fem/ops/common/operator.py)."""
    layer, x = build(256, 4, use_conv=True, **fields), tokens()
    with pytest.raises(Exception, match="graph_partition"):
        torch.compile(layer, mode="reduce-overhead")(x)
    whole = {"triton.cudagraphs": True, "graph_partition": False}
    _, codes = run_and_get_code(lambda: torch.compile(layer, options=whole)(x).sum().backward())
    assert len(codes) == 2
    assert not [code for code in codes if "partition_1" in code]


PADDING = {"attention_mask": torch.ones(2, 256, dtype=torch.bool, device="cuda").tril(99)}
DOCUMENTS = {"segment_ids": torch.arange(256, device="cuda").div(100, rounding_mode="floor").expand(2, -1)}


@full
@pytest.mark.parametrize("mode, most", [("eager", 118), ("compiled", 55)])
def test_padding_in_both_directions_waits_for_nothing(mode, most):
    row, _ = train(through(mode, build(256, 4, causal=False)), tokens(), **PADDING)
    assert row["forward"] + row["backward"] <= most + 8 * (not COUNTED)
    assert not row["waits"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("prior", PRIORS)
def test_padding_and_documents_are_read_in_16_bits(prior, dtype):
    layer, x = build(256, 4, prior_type=prior), tokens()
    with torch.autocast("cuda", dtype):
        for marks in ({}, PADDING, DOCUMENTS, PADDING | DOCUMENTS):
            layer(x, **marks).float().sum().backward()
            with torch.inference_mode():
                layer(x, **marks)
            with torch.no_grad():
                _, state = layer(x, **marks, return_state=True)
                layer(x, state=state, **marks)


@full
@pytest.mark.parametrize("rules, key_heads", [({}, 4), ({"window": 5}, 4), ({"window": 5}, 2)])
def test_a_softmax_read_is_compiled_for_any_sizes(rules, key_heads):
    """torch's attention takes no conditions on symbols, and no numbers of heads of which one is a product."""
    read = torch.compile(lambda *inputs: softmax_read(*inputs, **rules).mean.sum(), dynamic=True, fullgraph=True)
    sizes = (4, 16), (key_heads, 16), (key_heads, 8)
    heads = [torch.randn(2, 40, *size, device="cuda", requires_grad=True) for size in sizes]
    read(*heads, torch.ones(key_heads, 8, device="cuda")).backward()


@full
@pytest.mark.parametrize("key_heads", [2, 4])
def test_short_rows_under_a_window_are_compiled(key_heads):
    """FlexAttention has a kernel for few queries, which inductor can choose and then not build."""
    read = torch.compile(lambda *inputs: softmax_read(*inputs, window=5).mean.sum(), fullgraph=True)
    heads = [torch.randn(2, 77, n, 64, device="cuda", requires_grad=True).bfloat16() for n in (4, key_heads, key_heads)]
    read(*heads, torch.ones(key_heads, 64, device="cuda")).backward()


@full
def test_a_replaced_model_under_a_mask_is_one_graph():
    """Each attention is handed its own features, though one before it was read by FlexAttention."""
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, num_attention_heads=4, use_cache=False, **IDS))
    call = torch.compile(replace_attention(model).cuda(), backend="aot_eager", fullgraph=True)
    call(torch.zeros(2, 256, dtype=torch.long, device="cuda"), **PADDING).logits.sum().backward()


@full
def test_a_replaced_encoder_is_compiled_for_any_length():
    """Inductor had failed at the lists of blocks, whose numbers of rows and columns are one symbol."""
    encoder = BertModel(BertConfig(num_hidden_layers=1, num_attention_heads=4, intermediate_size=256, **IDS))
    call = torch.compile(replace_attention(encoder).cuda())
    for time in (50, 130):
        given = [torch.ones(2, time, dtype=torch.long, device="cuda") for _ in range(2)]
        with torch.autocast("cuda", torch.bfloat16):
            call(*given).last_hidden_state.sum().backward()


COMPILED = {  # what inductor or Triton once failed at: an unfused conditioner; merged reads and gates, in the backward
    "a wide conditioner": ({"use_conv": True, "conv_hidden": 300}, PADDING),
    "a conditioner in both directions": ({"use_conv": True, "causal": False, "conv_bidirectional": True}, PADDING),
    "linear in both directions": ({"prior_type": "linear", "causal": False}, {}),
    "gla in both directions": ({"prior_type": "gla", "causal": False}, {}),
}


@full
@pytest.mark.parametrize("name", COMPILED)
def test_layers_in_float32_are_compiled(name):
    fields, marks = COMPILED[name]
    torch.compile(build(256, 4, **fields))(tokens(), **marks).sum().backward()


@full
@pytest.mark.parametrize("rules", [{}, {"window": 64}])
def test_a_compiled_read_that_is_not_fused_waits_once_in_either_direction(rules):
    """For its proof. Gates of one number a head are no fused layer's."""
    row, _ = train(torch.compile(build(256, 4, gate_rank=0, **rules)), tokens())
    assert row["waits"] <= 2


@pytest.mark.parametrize("prior", PRIORS)
def test_the_widest_heads_fit_the_card(prior):
    for dtype in (torch.float32, torch.bfloat16):
        layer, x = build(512, 1, prior_type=prior, use_conv=True).to(dtype), tokens(time=130, width=512).to(dtype)
        layer(x).sum().backward()
        with torch.no_grad():
            _, state = layer(x, return_state=True)
            layer(x[:, :1], state=state)


@pytest.mark.parametrize(
    "head, dtype", [(128, torch.float32), (160, torch.float32), (256, torch.float32), (512, torch.bfloat16)]
)
def test_windows_of_wide_heads_are_read(head, dtype):
    """By FlexAttention where its tiles fit."""
    layer = build(2 * head, 2, window=17).to(dtype)
    layer(tokens(width=2 * head).to(dtype)).sum().backward()


@pytest.mark.parametrize("hidden", [256, 512])
def test_values_are_modulated_by_a_wide_models_conditioner(hidden):
    """Of 4,096 and 8,192 columns, such as a language model of 7 or 70 billion parameters has."""
    train(build(512, 8, use_conv=True, conv_hidden=hidden), tokens(width=512), warm=0)


IDS = {"vocab_size": 64, "hidden_size": 256}


def of_a_further_layer(build, **given) -> tuple[int, int]:
    """Launches and waits that a train step of the model that build(layers) makes takes more for two layers than one."""
    ids, taken = torch.zeros(2, 256, dtype=torch.long, device="cuda"), []
    for layers in (1, 2):
        torch._dynamo.reset()
        model = build(layers).cuda().train()
        for _ in range(2):
            with torch.autocast("cuda", torch.bfloat16), card.record() as events:
                model(ids, labels=ids, **given).loss.backward()
        taken.append((events.launches, events.waits))
    return tuple(more - fewer for fewer, more in zip(*taken))


@full
@pytest.mark.parametrize("marks, prior, most", [
    *[("segment_ids", *row) for row in (("softmax", 138), ("gla", 163), ("mamba", 164))],
    *[("attention_mask", *row) for row in (("softmax", 149), ("window", 152), ("gla", 177), ("mamba", 182))],
])  # fmt: skip
def test_a_further_layer_of_a_model_reads_no_marks_again(marks, prior, most):
    """In a train step that computes every block's forward twice."""

    fields = {"mixer": {"window": 64}} if prior == "window" else {"prior_type": prior}

    def built(layers):
        model = FEMForCausalLM(FEMConfig(num_hidden_layers=layers, num_attention_heads=4, **IDS, **fields))
        model.gradient_checkpointing_enable()
        return model

    document = (torch.arange(256, device="cuda") // 100).clamp_max(1).expand(2, -1)
    launches, waits = of_a_further_layer(built, **{marks: document})
    assert launches <= most + 16 * (not COUNTED)
    assert not waits


@full
@pytest.mark.parametrize("heads, masked, mode, most", [
    (4, False, "eager", 198), (4, True, "eager", 201), (2, False, "eager", 209), (2, True, "eager", 205),
    (4, False, "compiled", 98), (4, True, "compiled", 117), (2, False, "compiled", 114), (2, True, "compiled", 121),
])  # fmt: skip
def test_a_further_replaced_layer_waits_for_nothing(heads, masked, mode, most, monkeypatch):
    """Of heads of 64 and of 128 columns, under a mask too. The host reads zeros, so that all rows would pass for packed
    ones, and no mask would be known."""

    def built(layers):
        sizes = {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": heads // 2}
        model = replace_attention(LlamaForCausalLM(LlamaConfig(use_cache=False, intermediate_size=256, **sizes, **IDS)))
        for block in model.model.layers if mode == "compiled" else ():
            block.compile(fullgraph=True)
        return model

    time = torch.arange(256, device="cuda", dtype=torch.int32).expand(2, -1)
    ranges = 0 * time, time + 1, time < 0, torch.tensor([True, False])
    monkeypatch.setattr(bounded_attention, "_ranges_of", lambda mask, causal: ranges)
    if not masked:
        monkeypatch.setattr("transformers.masking_utils.find_packed_sequence_indices", lambda positions: None)
    launches, waits = of_a_further_layer(built)
    assert launches <= most + 8 * (not COUNTED)
    assert not waits


@full
@pytest.mark.parametrize(
    "prior, mode", [*product(("softmax", "gla"), MODES), *product(("rnn_softmax", "mamba"), ["eager"])]
)
def test_checkpointed_layers_run(prior, mode):
    layer = build(256, 4, prior_type=prior)
    train(through(mode, lambda x: checkpoint(layer, x, use_reentrant=False)), tokens())


@pytest.mark.parametrize(
    "width, heads, fields",
    [
        (2048, 16, {"gate_rank": 0, "use_conv": True}),
        (768, 12, {"use_conv": True}),
        (1024, 16, {"gate_rank": 8}),
        (1024, 16, {"prior_type": "gla", "use_conv": True}),
        (1024, 16, {"prior_type": "gla", "decay": "channel"}),
    ],
)
def test_matrix_products_have_widths_that_tensor_cores_like(width, heads, fields):
    _, awkward = train(build(width, heads, **fields), tokens(2, 128, width), warm=0)
    assert not awkward, awkward[:3]


@full
@pytest.mark.parametrize("prior, form, cache", [
    *[(prior, "exact", "dynamic") for prior in PRIORS],
    ("softmax", "sdpa", "dynamic"),
    ("softmax", "sdpa", "static"),
    ("softmax", "sdpa with the conditioner", "static"),
    *[(prior, "exact", "static") for prior in PRIORS if prior != "softmax"],
])  # fmt: skip
def test_a_model_generates(prior, form, cache):
    mixer = {"use_conv": False} if form == "sdpa" else {}
    form = form.split()[0]
    sizes = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = FEMConfig(**sizes, intermediate_size=128, prior_type=prior, mixer=mixer)
    model = FEMForCausalLM(config).cuda().bfloat16().eval()
    if form != "exact":
        model.set_attn_implementation(form)
    rows = 1 if cache == "static" else 2  # of one row PyTorch calls any view contiguous, whatever its stride
    prompt = torch.randint(128, (rows, 9)).cuda()
    mask = torch.ones_like(prompt)
    mask[0, :3] = 0

    def stop(ids, scores):  # the host reads zeros, so generation would not see that it is done
        if ids.shape[1] == 15:
            raise InterruptedError
        return torch.zeros(rows, dtype=torch.bool, device="cuda")

    how = {"max_new_tokens": 9, "stopping_criteria": [stop], "cache_implementation": cache}
    with pytest.raises(InterruptedError), card.record() as events:
        model.generate(prompt, attention_mask=mask, **how)
    assert bool(events.count("graph launched")) == (cache == "static"), events.summary()


@full
@torch.no_grad()
@pytest.mark.parametrize("prior, marks, most", [
    ("softmax", {}, 15), ("softmax", PADDING, 46), ("linear", {}, 18), ("linear", PADDING, 31), ("gla", {}, 20),
    ("gla", PADDING, 34), ("softmax", DOCUMENTS, 113), ("window", {}, 67), ("window", PADDING, 116),
])  # fmt: skip
def test_a_prompt_waits_for_nothing(prior, marks, most):
    fields = {"window": 64} if prior == "window" else {"prior_type": prior}
    layer, x = build(256, 4, **fields).bfloat16().eval(), tokens().bfloat16()
    for _ in range(3):
        layer(x, return_state=True, **marks)
    with card.record() as events:
        layer(x, return_state=True, **marks)
    assert not events.waits, events.summary()
    assert events.launches <= most + 8 * (not COUNTED), events.summary()


@full
@torch.no_grad()
@pytest.mark.parametrize("rows, time, marks, fields, most", [
    (2, 40, {}, {}, 67), (2, 40, PADDING, {}, 90), (2, 40, {}, {"window": 64}, 69),
    (2, 40, PADDING, {"free_share": 0.5, "n_kv_head": 2}, 98), (2, 40, {}, {"prior_type": "linear"}, 22),
    (2, 40, PADDING, {"prior_type": "gla"}, 27),
    (1, 8, {}, {}, 44), (1, 8, {}, {"window": 64}, 47),  # such as those that another model has guessed
])  # fmt: skip
def test_what_follows_a_prompt_waits_for_nothing(rows, time, marks, fields, most):
    """Forty of softmax's launches say who sees whom, once for all layers of a model."""
    layer, x = build(256, 4, **fields).bfloat16().eval(), tokens(rows, time).bfloat16()
    _, state = layer(tokens(rows).bfloat16(), return_state=True, **marks)
    for _ in range(3):
        with card.record() as events:
            layer(x, state=state, return_state=True)
    assert not events.waits, events.summary()
    assert events.launches <= most + 8 * (not COUNTED), events.summary()


@full
@torch.no_grad()
@pytest.mark.parametrize("marks, fields, most", [
    ({}, {}, 13), (PADDING, {}, 15), ({}, {"window": 64}, 14), (PADDING, {"window": 64}, 16),
])  # fmt: skip
def test_a_token_reads_the_cache_as_it_lies(marks, fields, most):
    """No key or value is copied because some are masked."""
    layer, x = build(256, 4, **fields).bfloat16().eval(), tokens(2, 1).bfloat16()
    _, state = layer(tokens().bfloat16(), return_state=True, **marks)
    for _ in range(3):
        with card.record() as events:
            _, state = layer(x, state=state, return_state=True)
    assert not events.waits, events.summary()
    assert events.launches <= most, events.summary()


@full
@torch.no_grad()
@pytest.mark.parametrize("hidden, most", [(0, 46), (9, 47)])
def test_a_replaced_layers_token_reads_the_cache_as_it_lies(hidden, most):
    """The original takes 40 launches, and 46 under a mask."""
    taken = []
    for layers in (1, 2):
        sizes = {"num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2}
        model = replace_attention(LlamaForCausalLM(LlamaConfig(intermediate_size=256, **sizes, **IDS)))
        model, cache = model.cuda().bfloat16().eval(), DynamicCache(config=model.config)
        ids = torch.zeros(2, 64, dtype=torch.long, device="cuda")
        for time in (64, 1, 1, 1):
            mask = torch.ones(2, cache.get_seq_length() + time, dtype=torch.long, device="cuda")
            mask[:, :hidden] = 0
            with card.record() as events:
                model(ids[:, :time], past_key_values=cache, attention_mask=mask if hidden else None)
        taken.append((events.launches, events.waits))
    launches, waits = (more - fewer for fewer, more in zip(*taken))
    assert launches <= most
    assert not waits


@full
@torch.no_grad()
@pytest.mark.parametrize("prior", PRIORS)
def test_a_token_can_be_captured_in_a_graph(prior):
    layer, x = build(64, 2, prior_type=prior).eval(), tokens(2, 1, 64)
    _, state = layer(tokens(2, 9, 64), return_state=True)
    for _ in range(3):
        layer(x)
        _, state = layer(x, state=state, return_state=True)
    with torch.cuda.graph(torch.cuda.CUDAGraph()), card.record() as events:
        layer(x)
        layer(x, state=state, return_state=True)
    assert not events.waits, events.summary()
    assert not [event for event in events if "illegal" in event], events.summary()


@pytest.mark.parametrize("step", [name for name in steps() if name != "layers"])
def test_a_step_of_the_doctor_raises_nothing(step):
    """Values aside: a comparison that fails says "off by" or "differs", an exception its type."""
    rows = list(steps()[step](torch.device("cuda", 0)))
    assert rows
    raised = [row for row in rows if re.match(r"\w+(Error|Exception|Failed|Exceeded)\b", row["result"])]
    assert not raised, raised[:3]


@full
@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("situation", SITUATIONS)
def test_a_situation_of_a_card_raises_nothing(situation, prior):
    SITUATIONS[situation](FreeEnergyMixerConfig(n_embd=64, n_head=2, prior_type=prior))
