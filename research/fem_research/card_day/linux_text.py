"""The text of the card's trainings: Linux's sources as Debian ships them, in pieces that travel, and their tokens.

`pack` needs Debian's package `linux-source-6.1`, or its tarball, and writes compressed pieces of text and a tokenizer.
`tokenise` turns these into two files of uint16, on a machine that need not have a network. Both are the same bytes
every time: the files are shuffled by a seed, and every product is listed with its SHA-256.
"""

from __future__ import annotations

import hashlib
import lzma
import os
import random
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO

import numpy as np
from tokenizers import Tokenizer

from fem.provenance import note, read_json, replacing, write_json
from fem.train.tokenizer import END, train_tokenizer

PACKAGE = "linux-source-6.1"
SUFFIXES = (".c", ".h", ".rst", ".txt")
LONGEST = 256 * 1024  # bytes; longer files are mostly tables of registers that programs wrote
DIRECTORY_DEPTH = 3  # drivers/net/ethernet is one directory, of which all or nothing is held out
SEPARATOR = "\0"  # between the files of a piece
TEXT, TOKENIZER, TOKENS, HELD_OUT = "text.json", "tokenizer.json", "tokens.json", "held_out"
FILES_AT_ONCE = 512

Files = list[tuple[str, str]]  # path and text


def pack(
    source: Path,
    output: Path,
    *,
    seed: int = 0,
    megabytes: float = 400.0,
    piece_megabytes: float = 200.0,
    held_out_megabytes: float = 4.0,
    tokenizer_megabytes: float = 50.0,
    vocabulary: int = 16384,
) -> dict:
    """Write `piece-N.xz`, `held_out.xz`, tokenizer.json and text.json to `output`; returns what text.json holds.

    source: the package as a .deb, or the tarball in it. A megabyte is 10^6 bytes of text. The held-out text is whole
    directories, in the order of the shuffle, none of which is in a piece. Raises ValueError on a source without text.
    """
    files, left_out = read_sources(source)
    shuffled = random.Random(seed)
    train, held_out = hold_out(files, shuffled, held_out_megabytes)
    shuffled.shuffle(train)
    train = first_megabytes(train, megabytes)
    if not train or not held_out:
        raise ValueError(f"source must hold text in several directories, got {len(files)} files in {str(source)!r}.")
    output.mkdir(parents=True, exist_ok=True)
    note(f"training a tokenizer of {vocabulary} entries.")
    trained = train_tokenizer((text for _, text in first_megabytes(train, tokenizer_megabytes)), vocabulary)
    with replacing(output / TOKENIZER) as temporary:
        trained.backend_tokenizer.save(str(temporary))
    facts = {
        "source": {"file": source.name, "sha256": digest_of_file(source)},
        "seed": seed,
        "suffixes": SUFFIXES,
        "longest_file": LONGEST,
        "left_out": left_out,
        "vocabulary": trained.backend_tokenizer.get_vocab_size(),
        "tokenizer": digest_of_file(output / TOKENIZER),
        "held_out_directories": sorted({directory(path) for path, _ in held_out}),
        "pieces": {HELD_OUT: write_piece(held_out, output / f"{HELD_OUT}.xz")},
    }
    number = 0
    while train:
        part = first_megabytes(train, piece_megabytes)
        train = train[len(part) :]
        facts["pieces"][f"piece-{number}"] = written = write_piece(part, output / f"piece-{number}.xz")
        note(f"piece {number}: {written['bytes'] / 1e6:.0f} MB of text in {written['packed'] / 2**20:.1f} MiB.")
        number += 1
    write_json(output / TEXT, facts)
    return facts


def read_sources(source: Path) -> tuple[Files, dict[str, int]]:
    """The source's files of text in the order of their paths, each content once, and how many were left out."""
    seen: set[bytes] = set()
    files: Files = []
    left_out = dict.fromkeys(("long", "binary", "duplicate"), 0)
    with open_tarball(source) as tarball:
        for member in tarball:
            if not member.isfile() or PurePosixPath(member.name).suffix not in SUFFIXES:
                continue
            if member.size > LONGEST:
                left_out["long"] += 1
                continue
            content = tarball.extractfile(member).read()
            try:
                text = content.decode("utf-8").strip()
            except UnicodeDecodeError:
                text = ""
            if not text or SEPARATOR in text:
                left_out["binary"] += 1
                continue
            digest = hashlib.sha256(text.encode()).digest()
            if digest in seen:
                left_out["duplicate"] += 1
                continue
            seen.add(digest)
            files.append((member.name.partition("/")[2], text))
    return sorted(files), left_out


@contextmanager
def open_tarball(source: Path) -> Iterator[tarfile.TarFile]:
    """The tarball of sources, read in one go: `source` itself, or the one in a .deb."""
    if not source.is_file():
        raise ValueError(f"source must be a .deb or a tarball that exists, got {str(source)!r}.")
    if source.suffix != ".deb":
        with tarfile.open(source, "r|*") as tarball:
            yield tarball
        return
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", source], stdout=subprocess.PIPE) as unpacking:
        with tarfile.open(fileobj=unpacking.stdout, mode="r|") as package:
            for member in package:
                if PurePosixPath(member.name).name.startswith(f"{PACKAGE}.tar"):
                    inner: IO[bytes] = package.extractfile(member)
                    with tarfile.open(fileobj=inner, mode="r|*") as tarball:
                        yield tarball
                    break
            else:
                raise ValueError(f"source must hold {PACKAGE}.tar.xz, got {str(source)!r} without it.")
        unpacking.stdout.read()


def directory(path: str) -> str:
    return "/".join(PurePosixPath(path).parts[:-1][:DIRECTORY_DEPTH])


def hold_out(files: Files, shuffled: random.Random, megabytes: float) -> tuple[Files, Files]:
    """Training and held-out files. Directories are held out whole, each that still fits, in random order."""
    sizes: dict[str, int] = {}
    for path, text in files:
        sizes[directory(path)] = sizes.get(directory(path), 0) + len(text.encode())
    names = sorted(sizes)
    shuffled.shuffle(names)
    chosen, left = set(), megabytes * 1e6
    for name in names:
        if sizes[name] <= left:
            chosen.add(name)
            left -= sizes[name]
    train = [file for file in files if directory(file[0]) not in chosen]
    return train, [file for file in files if directory(file[0]) in chosen]


def first_megabytes(files: Files, megabytes: float) -> Files:
    """The first files, as many as fit into so many megabytes of text, at least one if there is one."""
    left, count = megabytes * 1e6, 0
    for _, text in files:
        left -= len(text.encode())
        if left < 0 and count:
            break
        count += 1
    return files[:count]


def write_piece(files: Files, target: Path) -> dict:
    """Compress the texts in the order of their paths, where neighbours are alike; rows of tokens are shuffled later."""
    text = SEPARATOR.join(text for _, text in sorted(files)).encode()
    window = 1 << max(20, min(29, len(text).bit_length()))
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": window}]
    packed = lzma.compress(text, format=lzma.FORMAT_XZ, check=lzma.CHECK_CRC64, filters=filters)
    with replacing(target) as temporary:
        temporary.write_bytes(packed)
    sizes = {"files": len(files), "bytes": len(text), "packed": len(packed)}
    return sizes | {"sha256": hashlib.sha256(text).hexdigest(), "packed_sha256": hashlib.sha256(packed).hexdigest()}


def tokenise(packed: Path, output: Path) -> dict:
    """The tokens of the pieces in `packed`, as uint16: train.bin and held_out.bin in `output`, and tokens.json.

    Pieces of text.json that are not there are left out, so that one may travel by itself. Tokens that are there already
    are kept. Returns what tokens.json holds. Raises ValueError where a piece is damaged or none is there.
    """
    facts = read_json(packed / TEXT)
    if facts is None:
        raise ValueError(f"packed must be a folder with {TEXT}, got {str(packed)!r}.")
    there = [name for name in facts["pieces"] if (packed / f"{name}.xz").exists()]
    if HELD_OUT not in there or len(there) < 2:
        raise ValueError(f"packed must hold {HELD_OUT}.xz and a piece, got {', '.join(there) or 'none'}.")
    known = read_json(output / TOKENS)
    wanted = {
        "pieces": there,
        "tokenizer": facts["tokenizer"],
        "text": {n: facts["pieces"][n]["sha256"] for n in there},
    }
    if known is not None and {name: known.get(name) for name in wanted} == wanted:
        return known
    if digest_of_file(packed / TOKENIZER) != facts["tokenizer"]:
        raise ValueError(f"{TOKENIZER} in {str(packed)!r} has other bytes than were packed.")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    tokenizer = Tokenizer.from_file(str(packed / TOKENIZER))
    output.mkdir(parents=True, exist_ok=True)
    parts = {"train": [name for name in there if name != HELD_OUT], HELD_OUT: [HELD_OUT]}
    sizes = {}
    for part, names in parts.items():
        digest, count = hashlib.sha256(), 0
        with replacing(output / f"{part}.bin") as temporary, open(temporary, "wb") as file:
            for name in names:
                for ids in encoded(unpack(packed / f"{name}.xz", facts["pieces"][name]["sha256"]), tokenizer):
                    file.write(ids.tobytes())
                    digest.update(ids.tobytes())
                    count += len(ids)
        sizes[part] = {"tokens": count, "sha256": digest.hexdigest()}
    bytes_of = lambda names: sum(facts["pieces"][name]["bytes"] for name in names)  # noqa: E731
    found = wanted | {
        "vocabulary": facts["vocabulary"],
        "source": facts["source"],
        **{part: sizes[part] | {"bytes": bytes_of(names)} for part, names in parts.items()},
    }
    write_json(output / TOKENS, found)
    return found


def unpack(piece: Path, sha256: str) -> list[str]:
    """The texts of a piece. Raises ValueError where it is damaged."""
    try:
        text = lzma.decompress(piece.read_bytes())
    except (lzma.LZMAError, EOFError) as error:
        raise ValueError(f"{str(piece)!r} is damaged or cut off: {error}.") from error
    if hashlib.sha256(text).hexdigest() != sha256:
        raise ValueError(f"{str(piece)!r} holds another text than was packed.")
    return text.decode().split(SEPARATOR)


def encoded(texts: list[str], tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """The tokens of many texts at a time, an end token behind each text."""
    end = tokenizer.token_to_id(END)
    tokenizer.encode_special_tokens = True  # an end token that is spelt out in a text is text
    for start in range(0, len(texts), FILES_AT_ONCE):
        for encoding in tokenizer.encode_batch_fast(texts[start : start + FILES_AT_ONCE], add_special_tokens=False):
            yield np.array([*encoding.ids, end], np.uint16)


def read_tokens(folder: Path) -> tuple[np.ndarray, np.ndarray, dict]:
    """Training and held-out tokens that `tokenise` wrote, mapped into memory, and what tokens.json says of them."""
    facts = read_json(folder / TOKENS)
    if facts is None:
        raise ValueError(f"tokens must be a folder with {TOKENS}, got {str(folder)!r}; run the slice text first.")
    train, held_out = (np.memmap(folder / f"{part}.bin", np.uint16, mode="r") for part in ("train", HELD_OUT))
    for part, tokens in (("train", train), (HELD_OUT, held_out)):
        if len(tokens) != facts[part]["tokens"]:
            raise ValueError(f"{part}.bin in {str(folder)!r} is cut off: {len(tokens)} tokens; remove {TOKENS}.")
    return train, held_out, facts


def digest_of_file(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
