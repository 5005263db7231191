"""A recipe's data: its tokenizer, its rows of tokens, and the digests that identify both."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from fem.provenance import first_line, note
from fem.train.documents import TEXT, content, kind, local_documents, local_files
from fem.train.hub import way_to_the_hub
from fem.train.integrity import MANIFEST, damage, publish
from fem.train.packing import Row, Share, ShuffledRows, Tokens
from fem.train.pieces import without_endless_words
from fem.train.recipe import TrainRecipe
from fem.train.tokenizer import train_tokenizer

TOKENIZER_DOCUMENTS = 20_000
TOKENIZER, TOKENS = "tokenizer", "tokens"


def identity(recipe: TrainRecipe, tokenizer: PreTrainedTokenizerFast) -> dict:
    """The facts that decide the tokens: digests of tokenizer and files, or a hub dataset's name and subset."""
    files = local_files(recipe.data)
    spelt = f"{tokenizer.backend_tokenizer.to_str()} {tokenizer.eos_token_id}"
    facts = {
        "data": recipe.data if files is None else content(files),
        "field": recipe.field,
        "tokenizer": hashlib.blake2b(spelt.encode(), digest_size=16).hexdigest(),
    }
    return facts if files is not None else facts | {"subset": recipe.subset}


def load_tokenizer(recipe: TrainRecipe, output: Path) -> PreTrainedTokenizerFast:
    """The recipe's tokenizer, or one trained on the beginning of the local data and kept in `output`/tokenizer."""
    folder = output / TOKENIZER
    if recipe.tokenizer is None and folder.exists() and (folder / MANIFEST).exists() and (problem := damage(folder)):
        note(f"the tokenizer in {str(folder)!r} is damaged ({problem}); training it again on the data.")
        shutil.rmtree(folder)
    if recipe.tokenizer is None and not folder.exists():
        check_data(recipe)
        documents = islice(documents_of(recipe), TOKENIZER_DOCUMENTS)
        staging = folder.with_name(".tokenizer")
        shutil.rmtree(staging, ignore_errors=True)
        trained = train_tokenizer(without_endless_words(documents), recipe.vocabulary)
        try:
            trained.save_pretrained(staging)
        except Exception as error:
            if type(error) is not Exception:  # tokenizers raises a bare Exception where the disk fails
                raise
            raise OSError(f"the tokenizer could not be written to {str(output)!r}: {error}.") from error
        publish(staging, folder)
    name = str(folder) if recipe.tokenizer is None else recipe.tokenizer
    try:
        if not os.path.isdir(name):
            way_to_the_hub()
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        if "trust_remote_code" in str(error):
            raise ValueError(f"tokenizer {name!r} brings code of its own: fem runs none.") from None
        raise ValueError(f"tokenizer {name!r} cannot be read: {first_line(error)}") from error
    if tokenizer.eos_token_id is None:
        raise ValueError(f"tokenizer must have an end-of-text token to separate documents, got {name!r} without one.")
    if not tokenizer.is_fast:
        raise ValueError(f"tokenizer must have a tokenizer.json, got {name!r}, a {type(tokenizer).__name__} in Python.")
    return tokenizer


def documents_of(recipe: TrainRecipe) -> Iterator[str]:
    """The documents of the recipe's local files, long ones in pieces."""
    return local_documents(local_files(recipe.data), recipe.field)


def check_data(recipe: TrainRecipe) -> None:
    """Raises ValueError where the recipe names neither local files nor a dataset of the hub with a tokenizer."""
    if not recipe.data:
        raise ValueError("data must be given: --data with a file, a folder or the name of a dataset on the hub.")
    if local_files(recipe.data) is None and recipe.tokenizer is None:
        raise ValueError(
            f"data must be a file or a folder that exists, or a dataset of the hub together with --tokenizer, got "
            f"{recipe.data!r} and no tokenizer."
        )


def say_unread(recipe: TrainRecipe) -> None:
    """Say which options of the recipe, and which files in the folder of its data, a training does not read."""
    if recipe.architecture is not None:
        unread = "" if recipe.mlp == "narrowed" else f", and mlp = {recipe.mlp!r} is not read"
        note(f"in {recipe.architecture!r} a token sees the documents before its own in the row{unread}.")
    files = local_files(recipe.data)
    if files is not None and recipe.subset is not None:
        note(f"subset is a hub dataset's, and the data are local files, so {recipe.subset!r} is not read.")
    if recipe.tokenizer is not None and recipe.vocabulary != TrainRecipe.vocabulary:
        note(f"the tokenizer given has its own entries, so vocabulary = {recipe.vocabulary} is not read.")
    if files is not None and recipe.field != TrainRecipe.field and all(kind(path) in TEXT for path in files):
        note(f"text files have no fields, so field = {recipe.field!r} is not read.")
    if files is not None and Path(recipe.data).is_dir():
        others = sorted({p for p in Path(recipe.data).rglob("*") if p.is_file()} - set(files))
        if others:
            more = f" and {len(others) - 3} more" if len(others) > 3 else ""
            shown = ", ".join(path.name for path in others[:3]) + more
            note(f"files of other kinds in {recipe.data!r} are not read: {shown}.")


@dataclass(frozen=True)
class Data:
    """Rows to train on, rows to validate on, and one row on which the gates are measured."""

    train: ShuffledRows
    validation: list[Row]
    probe: Row


def load_data(recipe: TrainRecipe, output: Path, share: Share) -> Data:
    """The rows of `output`/tokens; held out are the last ones of the first request. Raises ValueError where there are
    too few."""
    tokens = Tokens.open(output / TOKENS)
    rows, *further = (limit // recipe.context for limit in tokens.limits)
    held_out = min(recipe.validation_rows, max(1, rows // 10))
    train = rows - held_out
    if train < 1:
        raise ValueError(
            f"data are too short: {tokens.limits[0]} tokens make {rows} rows of {recipe.context}; give more text, or a "
            "smaller context."
        )
    stretches = [range(train), *map(range, [rows, *further], further)]
    visible = recipe.documents == "visible"
    validation = [tokens.row(index, recipe.context, visible) for index in range(train, rows)]
    probe = tokens.row(train - 1, recipe.context, visible)
    return Data(ShuffledRows(tokens, recipe.context, stretches, share, recipe.seed, visible), validation, probe)
