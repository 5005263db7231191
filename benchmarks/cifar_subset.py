"""The 5,000 training and 1,000 test pictures of our CIFAR-10 pages, for `fem vision --profile cifar --data`.

    python benchmarks/cifar_subset.py runs/cifar.zip

benchmarks/cifar_subset.json says which: the places of a class's pictures in the order of CIFAR-10's own files.
They are written as JPEG of Pillow's usual quality, 75. The digest is of the pictures in the order of their names;
that of our pages begins as the JSON says. Another one means another order or another encoder: say so beside a result.
"""

import hashlib
import io
import json
import zipfile
from collections import defaultdict
from pathlib import Path

import typer
from datasets import Dataset, load_dataset

LISTED = Path(__file__).with_suffix(".json")


def pictures(split: Dataset, places: dict[str, list[int]]) -> dict[str, bytes]:
    """JPEG files by name, CLASS/PLACE.jpg. split: columns `img` and `label`, as of uoft-cs/cifar10."""
    of_class = defaultdict(list)
    for i, number in enumerate(split["label"]):
        of_class[split.features["label"].names[number]].append(i)
    found = {}
    for label, kept in places.items():
        for place in kept:
            file = io.BytesIO()
            split[of_class[label][place]]["img"].save(file, "JPEG")
            found[f"{label}/{place:04d}.jpg"] = file.getvalue()
    return found


def main(output: Path, data: str = "uoft-cs/cifar10") -> None:
    listed = json.loads(LISTED.read_text())
    files = {
        f"{name}/{file}": content
        for name in ("train", "test")
        for file, content in pictures(load_dataset(data, split=name), listed[name]).items()
    }
    files = dict(sorted(files.items()))
    output.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(output, "w") as archive:
        for file, content in files.items():
            archive.writestr(file, content)
    digest = hashlib.sha256(b"".join(files.values())).hexdigest()
    print(f"{output}: {len(files)} pictures, SHA-256 {digest[:16]}; ours {listed['sha256'][:16]}")


if __name__ == "__main__":
    typer.run(main)
