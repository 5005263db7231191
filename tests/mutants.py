"""Break the library in known ways, one at a time, and see the tests fail: `make mutants`.

Every mutant is one edit of one file and the tests that have to notice it. The edit is made in a copy of the tree. A
mutant that no test notices survives, and a guard that survives its removal is deleted or gets its test.

    python tests/mutants.py [PART OF A NAME ...]        exit status 1 if any survives
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


class Mutant:
    def __init__(self, name: str, file: str, old: str, new: str, *tests: str):
        self.name, self.file, self.old, self.new, self.tests = name, file, old, new, tests


SOFTMAX, READS, EDGES = "tests/ops/softmax", "tests/ops/test_reads.py", "tests/ops/test_edges.py"
PRECISION = "fem/ops/common/precision.py"
FUSED, PARTS = (f"tests/layer/{name}_cases.py" for name in ("fused", "parts"))  # in Triton's interpreter, as below
SCANS, OWN_SCANS, CONDITIONER, ONE_TOKEN = (
    f"tests/ops/{name}_cases.py" for name in ("scan", "channel_and_state", "conditioner", "token")
)
MUTANTS = (  # name, file, what stands there, what it becomes, and the tests that have to notice
    # The ten thresholds and guards on which exactness rests: the first four survived every fast test of the day they
    # were tried; the other six are our choice of what else has a boundary that a test should hold.
    Mutant("the certificate of the softmax read is e^-84", PRECISION,
           "math.exp(-60.0)", "math.exp(-84.0)", EDGES),
    Mutant("the certificate of linear attention is e^-84", PRECISION,
           "math.exp(-60.0)", "math.exp(-84.0)", EDGES),
    Mutant("dP is not centred at the likeliest key", "fem/ops/softmax/attend.py",
           "                dp -= dp.gather(-1, p.argmax(-1, keepdim=True))",
           "                pass", EDGES),
    Mutant("the form for narrow spans ends at 0.3", "fem/ops/softmax/packing.py",
           "SMALL_SPAN = 1.0", "SMALL_SPAN = 0.3", EDGES),
    Mutant("a packed cache proves what underflow may have taken", "fem/ops/softmax/cached.py",
           "_PROVEN, _LEAST = 30.0", "_PROVEN, _LEAST = 80.0", f"{SOFTMAX}/test_softmax_decode.py"),
    Mutant("the weights of a token step are not lifted above underflow", "fem/ops/softmax/one_query.py",
           "_LIFT = 2.0**40", "_LIFT = 1.0", f"{SOFTMAX}/test_softmax_decode.py"),
    Mutant("a token's kernel reads narrow channels by log R", "fem/ops/softmax/one_query_kernels.py",
           'narrow = small < float("inf")', 'narrow = small < float("-inf")', ONE_TOKEN),
    Mutant("a token's kernel reads values that a mask hides", "fem/ops/softmax/one_query_kernels.py",
           "y = tl.where(seen[:, None], y, 0.0)", "y = y", ONE_TOKEN),
    Mutant("a scan's token loses the digits of a small beta", "fem/ops/common/merge_kernels.py",
           "expm1(tl.minimum(lift, NEAR))", "(tl.exp(tl.minimum(lift, NEAR)) - 1.0)",
           ONE_TOKEN),
    Mutant("a state space's kernel remembers the document before", "fem/ops/ssm/ssm_kernels.py",
           "tl.where(tl.load(opens + token) != 0, LOG_ZERO, fall)", "fall", OWN_SCANS),
    Mutant("a state space's kernel reads cells without waiting for the threads that write them",
           "fem/ops/ssm/ssm_kernels.py", "        tl.debug_barrier()\n        old", "        old",
           OWN_SCANS),
    Mutant("a state space's kernel passes no gradient through its states' decay", "fem/ops/ssm/ssm_kernels.py",
           "a_sum += of_fall * step[:, None]", "pass", OWN_SCANS),
    Mutant("a state space's kernel loses the digits of a small beta", "fem/ops/ssm/summed_cells.py",
           "NARROW = tl.constexpr(1.0)", "NARROW = tl.constexpr(-1.0)", OWN_SCANS),
    Mutant("a state space's kernel forgets what it read while a channel was narrow", "fem/ops/ssm/summed_cells.py",
           "e + wide * s, e_lost", "e, e_lost", OWN_SCANS),
    Mutant("weights of linear attention up to e^90 are not scaled", "fem/ops/common/sums.py",
           "LIGHT = 30.0", "LIGHT = 90.0", EDGES, READS),
    Mutant("products of features may leave float32", "fem/ops/linear_attention/chunked.py",
           "LARGE_FEATURE = 2.0**23", "LARGE_FEATURE = 2.0**120", EDGES),
    Mutant("scans read log-weights of hundreds in float32", PRECISION,
           "2.0, 64.0, 16.0", "2.0, 64.0, 1e9", EDGES, READS),
    Mutant("a state space holds rows next to the end of float32", "fem/ops/ssm/ssm_read.py",
           "LEAST_SHIFT = -25.0", "LEAST_SHIFT = -85.0", EDGES),
    Mutant("doubtful rows of linear attention raise no flag", "fem/ops/linear_attention/scan_kernels.py",
           "    if tl.max(unproven.to(tl.int32)) > 0:", "    if tl.max(unproven.to(tl.int32)) > 1:",
           f"{SCANS} -k cannot_prove"),
    Mutant("a doubtful token of linear attention sees other documents",
           "fem/ops/linear_attention/doubtful_kernels.py",
           "!= 0, LOG_ZERO, fall)", "!= 0, fall, fall)", f"{FUSED} -k 'document_and_window and gla'"),
    Mutant("a document of linear attention begins with the memory of the one before",
           "fem/ops/linear_attention/scan_kernels.py", "FORGOTTEN = tl.constexpr(-104.0)",
           "FORGOTTEN = tl.constexpr(-52.0)", f"{FUSED} -k 'few_tokens or document_and_window'"),
    Mutant("decays get no gradient of doubtful tokens", "fem/ops/linear_attention/doubtful_kernels.py",
           "slope *= later + tl", "slope *= 0.0 * later + 0.0 * tl", f"{FUSED} -k 'in_doubt and some'"),
    Mutant("decays of channels count the queries in doubt alone", "fem/ops/linear_attention/doubtful_kernels.py",
           " - rise, exists)", " - 0.0 * rise, exists)", f"{FUSED} -k 'in_doubt and channel'"),
    Mutant("what doubtful key channels have kept is off", "fem/ops/linear_attention/doubtful_kernels.py",
           "(log_weight + entry, log_z)", "(log_weight + entry, log_z + 1e-3)", f"{FUSED} -k 'go_on and channel'"),
    Mutant("bfloat16 rounds the gradient of linear attention's weights", "fem/ops/linear_attention/scan_kernels.py",
           "(d_weight - rounded)", "(0.0 * rounded)", f"{SCANS} -k bfloat16_values"),
    # The mathematics of the layer.
    Mutant("values wider than the keys see the later queries of their block", "fem/ops/softmax/attend.py",
           "            s[..., keys].add_(hidden)",
           "            pass", f"{SOFTMAX}/test_softmax_read.py"),
    Mutant("masked tokens stand before kept ones", "fem/ops/common/kept_first.py",
           "torch.where(keep, count - 1, count[:, -1:] + place - count)", "place.clone()", "tests/layer/test_mixer.py"),
    Mutant("a masked token takes a position", "fem/ops/common/tokens.py",
           "count = ones.long().cumsum(1)",
           "count = torch.ones_like(ones).long().cumsum(1)", "tests/ops/test_tokens.py"),
    Mutant("an id that returns continues its old document", "fem/ops/common/tokens.py",
           "start = ones & known & (ids != previous)",
           "start = ones & known & (ids > previous)", "tests/ops/test_tokens.py"),
    Mutant("RoPE turns one half the wrong way", "fem/ops/common/rope.py",
           "torch.addcmul(low * cos, high, -sin)",
           "torch.addcmul(low * cos, high, sin)", "tests/ops/test_rope.py"),
    Mutant("the outer gate divides by the mean, not by the root of the mean square", "fem/ops/common/precision.py",
           "return s * torch.rsqrt(s.square().mean(-1, keepdim=True) + eps)",
           "return s / (s.mean(-1, keepdim=True) + eps)", "tests/layer/test_gates.py"),
    Mutant("the conditioner remembers the document before", "fem/ops/conditioner/plain_conditioner.py",
           'log_decay.masked_fill(tokens.start[..., None], float("-inf"))',
           "log_decay.masked_fill(tokens.start[..., None], 0.0)",
           "tests/layer/test_conditioner.py", "tests/layer/test_mixer.py"),
    Mutant("the conditioner hears masked tokens", "fem/ops/conditioner/plain_conditioner.py",
           "u = u.masked_fill(~tokens.keep[..., None], 0)",
           "pass", "tests/layer/test_conditioner.py", "tests/layer/test_mixer.py"),
    Mutant("the conditioner's kernels remember the document before", "fem/ops/conditioner/conditioner_kernels.py",
           'tl.where(starts[:, None], float("-inf"), log_decay)',
           "log_decay", CONDITIONER),
    Mutant("the conditioner's kernels lose the digits of a small softplus", "fem/ops/common/triton_math.py",
           "return tl.maximum(a, 0.0) + 2.0 * w * series",
           "return tl.maximum(a, 0.0) + tl.log(1.0 + z)", CONDITIONER),
    Mutant("a card's reciprocal decides whether a gate has a length", "fem/ops/conditioner/conditioner_kernels.py",
           "tl.where(by_norm, tl.sum(d_y", "tl.where(rate_of_a * LEAST_LENGTH < 1.0, tl.sum(d_y", CONDITIONER),
    Mutant("what enters a chunk decays not at all before it", "fem/ops/conditioner/conditioner_kernels.py",
           "reached += tl.exp(log_total) * far",
           "reached += far", CONDITIONER),
    Mutant("masked tokens have gradients in the conditioner's kernels", "fem/ops/conditioner/conditioner_kernels.py",
           "tl.where(kept, d_u, 0.0)",
           "d_u", CONDITIONER),
    Mutant("a piece of a scan's rows does not let what comes to it fall", "fem/ops/common/merge_kernels.py",
           "weight, lost = added(weight, lost, tl.load(ends + at, there, other=0.0))", "pass",
           OWN_SCANS),
    Mutant("a piece of channels hands no gradient of the free energy on to its weights",
           "fem/ops/channel_scan/channel_kernels.py",
           "w += tl.load(end + 6 * C, live, other=0.0) * gamma", "pass", OWN_SCANS),
    Mutant("a mask with holes passes for one of ranges", "fem/ops/softmax/fused/bounded_attention.py",
           "(ranges == sees).all() if", "torch.ones_like(idle).all() if", f"{PARTS} -k 'replaced_attention and hole'"),
    Mutant("tokens that are not there spoil the sums of a tile", "fem/ops/softmax/fused/elementwise_kernels.py",
           "x = tl.where(in_free, x - shift[None], 0.0)", "x -= shift[None]", f"{FUSED} -k any_span"),
    Mutant("fused kernels read narrow channels as others", "fem/ops/common/triton_math.py",
           "tl.max(narrow.to(tl.int32)) != 0", "tl.max(narrow.to(tl.int32)) > 1", f"{FUSED} -k 'bfloat16 and nearly'"),
    Mutant("a window over padded rows counts kept tokens alone", "fem/ops/softmax/support.py",
           "row if order is None else order.column", "row", f"{FUSED} -k 'masking and window'"),
    Mutant("the second of two calls of attention gives keys no gradient", "fem/ops/softmax/fused/parts_read.py",
           "d_k.add_(more_k)", "d_k", f"{PARTS} -k two"),
    Mutant("the first norm's kernel forgets how far blocks of inputs are apart",
           "fem/ops/conditioner/conditioner_kernels.py",
           "squares += tl.sum(centred * centred, 1) + apart * apart * (first * share)",
           "squares += tl.sum(centred * centred, 1)", CONDITIONER),
    Mutant("values are modulated without what they are", "fem/mixer.py",
           "torch.addcmul(v, v, scale)", "torch.addcmul(0 * v, v, scale)", "tests/layer/test_conditioner.py"),
    Mutant("of split values the first channels read the free energy", "fem/pipeline.py",
           "v, free = v.split([config.value_width - config.free_width, config.free_width], -1)",
           "free, v = v.split([config.free_width, config.value_width - config.free_width], -1)",
           "tests/layer/test_mixer.py"),
    Mutant("the cap clips what the mean reads", "fem/pipeline.py",
           "return v, None if free is v else free",
           "return (v if cap is None else free), None if free is v else free", "tests/layer/test_mixer.py"),
    Mutant("what stands in masked elements reaches the gradients of a read across", "fem/pooling.py",
           "memory = tokens.zero_masked(memory)", "pass", "tests/layer/test_pooling.py"),
    Mutant("the tables of a read across are of another beta", "fem/pooling.py",
           "self.temperature(v), self.gate", "2 * self.temperature(v), self.gate", "tests/layer/test_pooling.py"),
    Mutant("an operator's row that sees nothing has a logarithm", "fem/priors/operator.py",
           "ratio.where(sees, 1)", "ratio", "tests/layer/test_operator_prior.py"),
    Mutant("the sums of a cast state are rounded", "fem/state.py",
           "sums = torch.promote_types(target, torch.float32)", "sums = target", "tests/layer/test_states.py"),
    Mutant("beta starts at softplus(1)", "fem/gates.py",
           "self.start = config.beta_max_init", "self.start = 1.0", "tests/layer/test_config.py"),
)  # fmt: skip


def survives(mutant: Mutant) -> bool:
    """Whether all tests pass on the mutant. Raises ValueError where the edit fits nothing."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        for part in ("fem", "tests", "docs", "conftest.py", "pyproject.toml", "README.md"):
            copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
            tree.mkdir(exist_ok=True)
            copy(ROOT / part, tree / part)
        file = tree / mutant.file
        source = file.read_text()
        if source.count(mutant.old) < 1:
            raise ValueError(f"{mutant.file} has no {mutant.old!r}; the mutant {mutant.name!r} has to be written anew.")
        file.write_text(source.replace(mutant.old, mutant.new))
        pytest = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        environment, tests = os.environ | {"PYTHONPATH": str(tree)}, shlex.split(" ".join(mutant.tests))
        if tests[0].endswith("_cases.py"):
            pytest += ["-o", "addopts="]
            environment["TRITON_INTERPRET"] = "1"
        elif "::" not in tests[0]:
            pytest += ["-m", "not slow"]
        done = subprocess.run([*pytest, *tests], cwd=tree, env=environment, capture_output=True)
        crashed = -done.returncode in (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)  # a store beyond its tensor
        failed = done.returncode == 1 and b"\nFAILED " in done.stdout  # and not an error of a fixture
        if done.returncode != 0 and not failed and not crashed:
            raise ValueError(f"the tests of {mutant.name!r} did not run:\n{done.stdout.decode()[-2000:]}")
        return done.returncode == 0


def main(parts: list[str]) -> int:
    chosen = [mutant for mutant in MUTANTS if not parts or any(part in mutant.name for part in parts)]
    survivors = 0
    for mutant in chosen:
        alive = survives(mutant)
        survivors += alive
        print(f"{'SURVIVES' if alive else 'caught  '}  {mutant.name}", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} caught")
    return min(survivors, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
