"""`FEMModel` with transformers' heads: for sequences (a reward model with num_labels=1), tokens and answers."""

from __future__ import annotations

from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
)

from fem.models.modeling import FEMPreTrainedModel


class FEMForSequenceClassification(GenericForSequenceClassification, FEMPreTrainedModel):
    """logits = W h_t at the last token that is not padding, (B, config.num_labels); a reward model where that is 1."""


class FEMForTokenClassification(GenericForTokenClassification, FEMPreTrainedModel):
    """logits = W h_t + b at every token, (B, T, config.num_labels). A causal model sees no token to the right."""


class FEMForQuestionAnswering(GenericForQuestionAnswering, FEMPreTrainedModel):
    """Two logits for each token, (B, T): an answer starts there, and ends there."""
