"""torchtitan's trainer on the card that is not there, as the first of eight: `make card-titan`.

PyTorch's fake backend stands for the other seven. A process of its own trains each case for three steps of packed
rows, and prints what the last one took. Fused layers launch a kernel of their gates.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

TENSOR, ROWS = (f"--parallelism.{name}-parallel-degree" for name in ("tensor", "context"))
CASES = {  # configuration, whether its layers are fused, and options
    "slim, blocks computed again": ("paper_340m_slim", True),
    "split, blocks computed again": ("paper_340m_split", True),
    "full, blocks computed again and compiled": ("paper_340m", True, "--compile.enable"),
    "full, heads over two": ("debug", False, TENSOR, "2"),
    "slim, a row over two": ("debug_slim", False, ROWS, "2"),
}
SIZES = {"global-batch-size": 8, "local-batch-size": 1, "seq-len": 256, "steps": 3, "mixed-precision-param": "bfloat16"}
WAITS = 5  # of a step, four of them torchtitan's own


def run(folder: Path, config: str, *options: str) -> None:
    """Train one configuration; print how often its last step launched the gates' kernel, launched and waited."""
    import card

    card.pose()
    from torchtitan.train import main
    from torchtitan.trainer import Trainer

    from fem.models.arguments import Inputs

    # Rows of several documents: where positions restart the host, which reads zeros, would see none.
    Inputs.documents = lambda given: (given.position_ids == 0).cumsum(-1)
    step, taken = Trainer.train_step, []

    def counted(*arguments, **named):
        with card.record() as events:
            step(*arguments, **named)
        taken[:] = events.count("triton mix_kernel"), events.launches, events.waits

    Trainer.train_step = counted
    given = [part for name, value in SIZES.items() for part in (f"--training.{name}", str(value))]
    fake = ["--comm.mode", "fake_backend", "--dataloader.dataset-path", str(folder / "run" / "tokens")]
    fake += ["--dump-folder", str(folder / "titan")]
    sys.argv[1:] = ["--module", "fem.train.titan", "--config", config, *fake, *given, *options]
    main()
    print(*taken)


def write_rows(folder: Path) -> None:
    """Tokens, by `fem train` on the CPU."""
    (folder / "text.txt").write_text("\n\n".join(str(2**n) for n in range(2000)))
    plain = {name: x for name, x in os.environ.items() if name not in ("PYTHONPATH", "LD_LIBRARY_PATH")}
    options = ["--data", folder / "text.txt", "--output", folder / "run", "--context", 256, "--steps", 1]
    command = [sys.executable, "-m", "fem.cli", "train", *map(str, options), "--batch-size", "1"]
    subprocess.run(command, env=plain, check=True, capture_output=True)


def main() -> None:
    first = {"NGPU": "8", "WORLD_SIZE": "8", "RANK": "0", "LOCAL_RANK": "0"}
    with tempfile.TemporaryDirectory() as folder:
        write_rows(Path(folder))
        for name, (config, fused, *options) in CASES.items():
            command = [sys.executable, __file__, folder, config, *options]
            done = subprocess.run(command, env=os.environ | first, capture_output=True, text=True)
            if done.returncode:
                sys.exit(f"{name}: {done.stderr.strip()[-2000:]}")
            gates, launches, waits = map(int, done.stdout.splitlines()[-1].split())
            print(f"{name}: {launches} launches, {waits} waits, {'fused' if gates else 'not fused'}", flush=True)
            if fused != (gates > 0) or (fused and waits > WAITS):
                wanted = f"fused, at most {WAITS} waits" if fused else "not fused"
                sys.exit(f"{name}: wanted {wanted}.")


if __name__ == "__main__":
    if sys.argv[1:]:
        run(Path(sys.argv[1]), *sys.argv[2:])
    else:
        main()
