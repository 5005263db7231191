"""Our models, and Llama for comparison, as transformers' test suite needs them. Run by `transformers_suite`."""

from __future__ import annotations

import os
import unittest

import torch
import transformers
from tests.test_configuration_common import ConfigTester
from tests.test_modeling_common import ModelTesterMixin, global_rng, ids_tensor, random_attention_mask
from transformers import LlamaConfig
from transformers.models.auto import modeling_auto as auto

from fem import models
from fem.models import FEMConfig

PRIOR = os.environ["FEM_SUITE_PRIOR"]
LIBRARY, FAMILY = (transformers, "Llama") if PRIOR == "llama" else (models, "FEM")
HEADS = ("Model", "ForCausalLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
CLASSES = tuple(getattr(LIBRARY, FAMILY + head) for head in HEADS)

for head, names in {
    "Model": auto.MODEL_MAPPING_NAMES,
    "ForCausalLM": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "ForSequenceClassification": auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    "ForTokenClassification": auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    "ForQuestionAnswering": auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
}.items():
    names["fem"] = f"FEM{head}"  # from which the suite reads which labels a class takes


FEMConfig.sliding_window = None  # which the suite sets; no layer has a window here


class Sizes:
    """The model tester that the suite expects."""

    batch_size, seq_length, is_training = 13, 7, True
    vocab_size, hidden_size, num_hidden_layers, num_attention_heads, num_key_value_heads = 99, 32, 2, 4, 2

    def __init__(self, parent):
        self.parent = parent

    def get_config(self):
        names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
        sizes = {name: getattr(self, name) for name in names} | {"intermediate_size": 32, "pad_token_id": 0}
        if PRIOR == "llama":
            return LlamaConfig(**sizes, num_key_value_heads=2, max_position_embeddings=512, bos_token_id=1)
        if PRIOR.endswith("without C"):
            sizes |= {"mixer": {"use_conv": False}, "num_key_value_heads": 2}
        return FEMConfig(**sizes, prior_type=PRIOR.split()[0], max_position_embeddings=512, bos_token_id=1)

    def prepare_config_and_inputs_for_common(self):
        size = [self.batch_size, self.seq_length]
        return self.get_config(), {
            "input_ids": ids_tensor(size, self.vocab_size),
            "attention_mask": random_attention_mask(size),
        }


class SuiteTest(ModelTesterMixin, unittest.TestCase):
    all_model_classes = CLASSES

    def setUp(self):
        torch.set_num_threads(1)
        torch.manual_seed(0)
        global_rng.seed(0)  # of the suite's inputs
        # A mixer makes no maps of attention, but without C it reads by transformers' attention functions too.
        name = self._testMethodName
        by_functions = "eager_matches_sdpa" in name and not name.endswith("output_attentions")
        self.has_attentions = PRIOR == "llama" or (PRIOR.endswith("without C") and by_functions)
        self.model_tester = Sizes(self)
        self.config_tester = ConfigTester(self, config_class=type(self.model_tester.get_config()), hidden_size=32)

    def test_config(self):
        self.config_tester.run_common_tests()

    def test_generation_tester_mixin_inheritance(self):
        self.skipTest("the source distribution lacks the suite of generation")
