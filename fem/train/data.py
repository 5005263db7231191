"""A recipe's data: documents read by `datasets`, written once as token ids, and rows of these ids.

A row is {"input_ids", "labels", "segment_ids"}, each (context,). Documents stand one behind the other, each with an
end token; one that does not fit continues in the next row. Segment ids count the documents of a row; the first token of
each is no target (-100). Where documents are visible there are no segment ids, and every token but the row's first is a
target.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator
from functools import lru_cache
from glob import escape
from itertools import groupby, islice
from pathlib import Path

import numpy as np
import torch
from datasets import IterableDataset, load_dataset
from datasets.table import CastError
from torch import Tensor
from torch.utils.data import Dataset
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from fem.models.loss import IGNORED
from fem.provenance import first_line, note, read_json, write_json
from fem.train.checkpoints import readable
from fem.train.recipe import TrainRecipe
from fem.train.signals import Paused
from fem.train.tokenizer import train_tokenizer

Row = dict[str, Tensor]
TOKENS, TOKENIZER = "tokens", "tokenizer"  # in the output folder
FORMATS = {".txt": "text", ".md": "text", ".jsonl": "json", ".parquet": "parquet"}  # by what `datasets` reads each
TOKENIZER_DOCUMENTS = 20_000
VOCABULARIES = ("tokenizer", "vocab", "spiece", "sentencepiece")  # how files that tokenizers are read from begin
SECONDS = 6.0  # for the hub to connect, and to answer
SECONDS_A_NOTE = 10.0
AT_ONCE = 2_000_000  # characters, whose encodings take some 250 MB
PIECE = 1 << 16  # characters
GAP = re.compile(r"(?<=\S)\s(?=\S)")
SOURCE, DONE = "source.json", "done.json"


def local_files(data: str) -> list[Path] | None:
    """The files that `data` names, sorted by name where it is a folder; None where there is no such path.

    Raises ValueError on a folder without text, JSON lines or Parquet, and on a file of another kind.
    """
    path = Path(data)
    if not path.exists():
        return None
    inside = sorted(contents(path)) if path.is_dir() else [path]
    files = [p for p in inside if p.suffix.lower() in FORMATS]
    if not files:
        raise ValueError(f"data must be {', '.join(FORMATS)} or a folder of such files, got {data!r}.")
    if strange := [p for p in files if not p.is_file()]:
        raise ValueError(f"data must be regular files, got {str(strange[0])!r}, a pipe, device or folder.")
    return files


def contents(folder: Path) -> Iterator[Path]:
    """All that a folder and those in it hold. Raises ValueError on one that may not be read; `rglob` leaves it out."""

    def refuse(error: OSError):
        raise ValueError(f"data must be readable, got {error.filename!r}: {error.strerror}.") from error

    for where, folders, names in os.walk(folder, onerror=refuse):
        yield from (Path(where, name) for name in (*folders, *names))


def check_data(recipe: TrainRecipe, output: Path) -> None:
    """Raises ValueError where the recipe names neither local files nor a dataset of the hub with a tokenizer."""
    if not recipe.data:
        raise ValueError("data must be given: --data with a file, a folder or the name of a dataset on the hub.")
    if local_files(recipe.data) is None and recipe.tokenizer is None:
        raise ValueError(
            f"data must be a file or a folder that exists, or a dataset of the hub together with --tokenizer, got "
            f"{recipe.data!r} and no tokenizer."
        )
    if Path(recipe.data).is_dir() and output.resolve().is_relative_to(Path(recipe.data).resolve()):
        raise ValueError(f"output must lie outside the folder of the data, got {str(output)!r} in {recipe.data!r}.")


def say_unread(recipe: TrainRecipe) -> None:
    """Say which options of the recipe, and which files in the folder of its data, a training does not read."""
    files = local_files(recipe.data)
    if recipe.architecture is not None and recipe.mlp != TrainRecipe.mlp:
        note(f"mlp is a preset's, so in {recipe.architecture!r} mlp = {recipe.mlp!r} is not read.")
    if files is not None and recipe.subset is not None:
        note(f"subset is a hub dataset's, and the data are local files, so {recipe.subset!r} is not read.")
    if recipe.tokenizer is not None and recipe.vocabulary != TrainRecipe.vocabulary:
        note(f"the tokenizer given has its own entries, so vocabulary = {recipe.vocabulary} is not read.")
    if files is not None and Path(recipe.data).is_dir():
        leaves = (p for p in contents(Path(recipe.data)) if p.is_symlink() or not p.is_dir())
        others = sorted({p.name for p in leaves if p not in files})
        if others:
            more = f" and {len(others) - 3} more" if len(others) > 3 else ""
            what = f"files of other kinds and links to folders in {recipe.data!r}"
            note(f"{what} are not read: {', '.join(others[:3])}{more}.")


def documents(recipe: TrainRecipe) -> list[tuple[IterableDataset, str]]:
    """The recipe's documents, read as they come, and the field of their text: a text file is one, and so is a record.

    Raises ValueError where there are none, or where they cannot be read.
    """
    files, parts = local_files(recipe.data), []
    try:
        if files is None:
            way_to_the_hub()
            parts.append((load_dataset(recipe.data, recipe.subset, split="train", streaming=True), recipe.field))
        for kind, some in groupby(files or (), key=lambda path: FORMATS[path.suffix.lower()]):
            how = {"sample_by": "document", "encoding": "utf-8-sig"} if kind == "text" else {}
            names = [escape(str(path)) for path in some]  # in which `datasets` reads patterns
            part = load_dataset(kind, data_files=names, split="train", streaming=True, **how)
            parts.append((part, "text" if kind == "text" else recipe.field))
        firsts = [(next(iter(part), None), field) for part, field in parts]
    except UnicodeDecodeError as error:
        raise ValueError(f"data must be UTF-8, got {unfit(recipe)!r} with other bytes.") from error
    except Exception as error:  # what `datasets` raises differs by file, connection and version
        told = f"data must be a file, a folder or a dataset of the hub, got {recipe.data!r}: {first_line(error)}"
        raise ValueError(told) from error
    for first, field in firsts:
        if first is None:
            raise ValueError(f"data must not be empty, got {recipe.data!r} with a file without a record.")
        if field not in first:
            told = f"every record must have text in {field!r}, got the fields {', '.join(first)}"
            raise ValueError(f"{told}; name the field with --field.")
    return [(part.select_columns(field), field) for part, field in parts]


def way_to_the_hub() -> None:
    """Raises OSError if the hub cannot be reached, or if HF_HUB_OFFLINE forbids it. The hub is asked once: its client
    asks again and again, for minutes."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=SECONDS)
    except Exception as error:
        raise OSError(f"no way to {constants.ENDPOINT} within {SECONDS:g} seconds ({first_line(error)})") from error


def texts_of(recipe: TrainRecipe, part: IterableDataset, field: str) -> Iterator[str]:
    """The texts of a part. Raises ValueError on a record that has none, and on a file that cannot be read; `Paused`
    where the hub no longer answers."""
    try:
        for record in part:
            if not isinstance(text := record[field], str):
                told = "null" if text is None else f"a {type(text).__name__}"
                raise ValueError(f"every record must have text in {field!r}, got {told}; name the field with --field.")
            if "\0" in text:
                raise ValueError(f"data must be plain text, got {unfit(recipe)!r} with zero bytes.")
            yield text
    except UnicodeDecodeError as error:
        raise ValueError(f"data must be UTF-8, got {unfit(recipe)!r} with other bytes.") from error
    except (CastError, KeyError) as error:  # the latter by datasets 4
        told = f"data must be files of the same fields, got {recipe.data!r} with a file of others."
        raise ValueError(told) from error
    except ValueError:
        raise
    except Exception as error:
        if local_files(recipe.data) is None:
            told = f"{recipe.data!r} can no longer be read ({first_line(error)}); its tokens so far are saved"
            raise Paused(told) from error
        raise ValueError(f"data cannot be read, got {recipe.data!r}: {first_line(error)}") from error


def unfit(recipe: TrainRecipe) -> str:
    """The first local file that is no UTF-8 or has a zero byte: `datasets` does not say which file it reads."""
    for path in local_files(recipe.data) or ():
        if path.suffix.lower() == ".parquet":
            continue
        try:
            if "\0" not in path.read_text(encoding="utf-8"):
                continue
        except UnicodeDecodeError:
            pass
        return str(path)
    return recipe.data


def digest(path: Path) -> str:
    """BLAKE2b of a file's bytes, 128 bits in hexadecimal."""
    hasher = hashlib.blake2b(digest_size=16)
    with open(path, "rb") as file:
        while part := file.read(1 << 20):
            hasher.update(part)
    return hasher.hexdigest()


def identity(recipe: TrainRecipe, tokenizer: PreTrainedTokenizerFast | None = None) -> dict[str, str | None]:
    """All that decides the tokens: digests of the tokenizer, if given, and of the files, or a hub dataset's name and
    subset."""
    files = local_files(recipe.data)
    content = "\n".join(f"{FORMATS[path.suffix.lower()]} {digest(path)}" for path in files or ())
    found = {
        "data": recipe.data if files is None else hashlib.blake2b(content.encode(), digest_size=16).hexdigest(),
        "subset": recipe.subset if files is None else None,
        "field": recipe.field,
    }
    if tokenizer is not None:
        spelt = f"{tokenizer.backend_tokenizer.to_str()} {tokenizer.eos_token_id}"
        found["tokenizer"] = hashlib.blake2b(spelt.encode(), digest_size=16).hexdigest()
    return found


def load_tokenizer(recipe: TrainRecipe, output: Path) -> PreTrainedTokenizerFast:
    """The recipe's tokenizer, or one trained on the beginning of the local data and kept in `output`/tokenizer."""
    folder = output / TOKENIZER
    if recipe.tokenizer is None and not folder.exists():
        texts = (text for part in documents(recipe) for text in texts_of(recipe, *part))
        trained = train_tokenizer(
            (piece for text in islice(texts, TOKENIZER_DOCUMENTS) for piece in pieces(text)), recipe.vocabulary
        )
        staging = folder.with_name(".tokenizer")
        try:
            trained.save_pretrained(staging)
        except Exception as error:
            if type(error) is not Exception:  # tokenizers raises a bare Exception where the disk fails
                raise
            raise OSError(f"the tokenizer could not be written to {str(output)!r}: {error}.") from error
        staging.replace(folder)
    name = str(folder) if recipe.tokenizer is None else recipe.tokenizer
    if os.path.isdir(name) and not any(file.name.startswith(VOCABULARIES) for file in Path(name).glob("*.*")):
        raise ValueError(f"tokenizer must be a folder with a tokenizer.json, such as RUN/tokenizer, got {name!r}.")
    with readable(f"tokenizer {name!r}"):
        if not os.path.isdir(name):
            way_to_the_hub()
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    if tokenizer.eos_token_id is None:
        raise ValueError(f"tokenizer must have an end-of-text token to separate documents, got {name!r} without one.")
    if not tokenizer.is_fast:
        raise ValueError(f"tokenizer must have a tokenizer.json, got {name!r}, a {type(tokenizer).__name__} in Python.")
    return tokenizer


def write_tokens(recipe: TrainRecipe, tokenizer: PreTrainedTokenizerFast, source: dict, folder: Path) -> None:
    """Write the ids of all local documents to `folder`, or of as many of the hub's as the recipe reads, each with an
    end token. A call that was cut off is continued by the next of the same `source`, their `identity`; a note says
    every ten seconds how far it is.

    tokens.bin: ids, uint32; ends.bin: where documents end, int64. Raises ValueError where no document has a token.
    """
    if folder.exists():  # config.json has their `source`
        return
    staging = folder.with_name(f".{folder.name}")
    if read_json(staging / SOURCE) != source:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        write_json(staging / SOURCE, source)
    done = read_json(staging / DONE) or {"tokens": 0, "documents": 0, "part": 0, "state": None}
    limit = None if local_files(recipe.data) is not None else recipe.tokens
    due = time.monotonic() + SECONDS_A_NOTE
    with open(staging / "tokens.bin", "ab") as tokens, open(staging / "ends.bin", "ab") as ends:
        tokens.truncate(4 * done["tokens"])
        ends.truncate(8 * done["documents"])
        parts = documents(recipe)
        for number, (part, field) in enumerate(parts[done["part"] :], done["part"]):
            if done["state"] is not None:
                part.load_state_dict(done["state"])
            for batch in batches(texts_of(recipe, part, field)):
                for ids in encoded(batch, tokenizer):
                    tokens.write(ids.tobytes())
                    done["tokens"] += len(ids)
                    ends.write(np.int64(done["tokens"]).tobytes())
                    done["documents"] += 1
                if limit is not None and done["tokens"] >= limit:
                    break
                if time.monotonic() > due:
                    tokens.flush()
                    ends.flush()
                    write_json(staging / DONE, done | {"part": number, "state": part.state_dict()})
                    of = "" if limit is None else f" of {limit:,}"
                    note(f"tokenising: {done['tokens']:,} tokens{of} so far.")
                    due = time.monotonic() + SECONDS_A_NOTE
            done["state"] = None
    if done["tokens"] == done["documents"]:
        raise ValueError(f"data must not be empty, got {recipe.data!r}, documents without a token.")
    staging.replace(folder)


def batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """Lists of some texts, taken only when they are asked for."""
    batch, size = [], 0
    for text in texts:
        batch.append(text)
        size += len(text) + 1
        if size >= AT_ONCE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def encoded(texts: list[str], tokenizer: PreTrainedTokenizerFast) -> Iterator[np.ndarray]:
    """Each text's tokens and an end token. Special tokens that a text spells out are text, and the truncation and
    padding that a tokenizer was saved with are left out."""
    backend = tokenizer.backend_tokenizer
    backend.encode_special_tokens = True
    backend.no_truncation()
    backend.no_padding()
    cut = [list(pieces(text)) for text in texts]
    found = iter(backend.encode_batch_fast([piece for parts in cut for piece in parts], add_special_tokens=False))
    for parts in cut:
        ids = [token for encoding in islice(found, len(parts)) for token in encoding.ids]
        yield np.array([*ids, tokenizer.eos_token_id], np.uint32)


def pieces(text: str) -> Iterator[str]:
    """The text in pieces of at most 65,536 characters, which bounds the memory of encodings.

    A piece ends before a space between visible characters, where byte-pair tokenizers separate words anyway; where
    there is none, anywhere.
    """
    start = 0
    while len(text) - start > PIECE:
        gaps = [gap.start() for gap in GAP.finditer(text, start + PIECE // 2, start + PIECE)]
        end = gaps[-1] if gaps else start + PIECE
        yield text[start:end]
        start = end
    yield text[start:]


class Rows(Dataset):
    """Rows of `context` tokens of a folder that `write_tokens` wrote, one behind the other.

    Raises ValueError where a file is cut off.
    """

    def __init__(self, folder: Path, context: int, visible: bool = False):
        with readable(f"the tokens in {str(folder)!r}", "remove the folder to write them again"):
            self.tokens = np.memmap(folder / "tokens.bin", np.uint32, "r")
            self.ends = np.memmap(folder / "ends.bin", np.int64, "r")
            if len(self.tokens) != self.ends[-1]:
                raise EOFError(f"there are {len(self.tokens)} of {self.ends[-1]}")
        self.context, self.visible = context, visible

    def __len__(self) -> int:
        return len(self.tokens) // self.context

    def __getitem__(self, index: int) -> Row:
        begin, end = index * self.context, (index + 1) * self.context
        ids = torch.from_numpy(self.tokens[begin:end].astype(np.int64))
        opens = torch.zeros(self.context, dtype=torch.bool)
        if not self.visible:
            first, last = np.searchsorted(self.ends, (begin, end))
            opens[torch.from_numpy(self.ends[first:last] - begin)] = True
        opens[0] = True
        row = {"input_ids": ids, "labels": ids.where(~opens, IGNORED)}
        return row if self.visible else row | {"segment_ids": opens.cumsum(0)}


class Shuffled(Dataset):
    """`length` rows: the first `count` in a seeded order, another each epoch. No row is read to skip one."""

    def __init__(self, rows: Rows, count: int, length: int, seed: int):
        self.rows, self.count, self.length, self.seed = rows, count, length, seed

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Row:
        epoch, place = divmod(index, self.count)
        return self.rows[int(_order(self.count, self.seed, epoch)[place])]


@lru_cache(maxsize=2)
def _order(count: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch, 0)).permutation(count)


def load_rows(recipe: TrainRecipe, output: Path) -> tuple[Shuffled, list[Row], Row]:
    """The rows of all steps, those to validate on (the last ones), and one row on which the gates are measured.

    Raises ValueError where there are too few.
    """
    rows = Rows(output / TOKENS, recipe.context, recipe.documents == "visible")
    held_out = min(recipe.validation_rows, max(1, len(rows) // 10))
    count = len(rows) - held_out
    if count < 1:
        raise ValueError(
            f"data are too short: {len(rows.tokens)} tokens make {len(rows)} rows of {recipe.context}; give more text, "
            "or a smaller context."
        )
    train = Shuffled(rows, count, recipe.max_steps * recipe.batch_size, recipe.seed)
    return train, [rows[index] for index in range(count, len(rows))], rows[count - 1]
