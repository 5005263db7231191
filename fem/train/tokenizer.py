"""A byte-pair tokenizer that is trained on the texts at hand, and the size of any."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

END = "<|end|>"


def train_tokenizer(documents: Iterable[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """A byte-level byte-pair tokenizer of at most `vocabulary` entries, which encodes any text without loss."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(documents, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=END, clean_up_tokenization_spaces=False
    )


def as_trained(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """The tokenizer as `fem train` encodes by it: without the tokens that its template puts around a text."""
    if tokenizer.backend_tokenizer.post_processor is None:
        return tokenizer
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.post_processor = None
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=tokenizer.clean_up_tokenization_spaces,
        **tokenizer.special_tokens_map,
    )


def entries(tokenizer: PreTrainedTokenizerBase) -> int:
    """The entries that an embedding needs: one more than the largest id, as ids may have holes."""
    return max(tokenizer.get_vocab().values()) + 1
