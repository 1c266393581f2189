"""Step-3.5's language model, of parts of ``transformers``, which has a class with a tower alone."""

from typing import ClassVar

from torch import nn
from transformers import AutoModelForCausalLM, GenerationMixin
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.step3p7.modeling_step3p7 import (
    Step3p7PreTrainedModel,
    Step3p7TextConfig,
    Step3p7TextModel,
)


class Step3p5ForCausalLM(Step3p7PreTrainedModel, GenerationMixin):
    """``transformers``' text model with a head, which saves the published names."""

    config_class = Step3p7TextConfig
    config: Step3p7TextConfig
    _tied_weights_keys: ClassVar = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config):
        super().__init__(config)
        self.model = Step3p7TextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids=None, labels=None, attention_mask=None, **more):
        """Return the logits and, given ``labels``, the loss."""
        found = self.model(input_ids=input_ids, attention_mask=attention_mask, **more)
        logits = self.lm_head(found.last_hidden_state)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config.vocab_size)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=found.cache)


_MOE = [
    one
    for one in get_checkpoint_conversion_mapping("step3p7") or ()
    if "moe" in str(one.source_patterns) or "share_expert" in str(one.source_patterns)
]
register_checkpoint_conversion_mapping("step3p5", _MOE, overwrite=True)
AutoModelForCausalLM.register(Step3p7TextConfig, Step3p5ForCausalLM, exist_ok=True)
