"""A family in one file: attention over unit vectors, then a squared ReLU of frozen features."""

from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn.functional import normalize

from moetrain.models.architecture import Architecture, Part, Weight
from moetrain.models.attention import Attention, GroupedQueryAttention, masked_attention
from moetrain.models.decoders import COMMON_DEFAULTS, DENSE
from moetrain.models.families import register
from moetrain.models.family import Family, Rename
from moetrain.models.layers import Linear
from moetrain.models.rules import COLWISE, ROWWISE

FROZEN = replace(COLWISE, storage=torch.bfloat16, trainable=False)


class CosineAttention(GroupedQueryAttention):
    def build(self, kernels, moe):
        return Attention(self, kernels, self.core)

    @staticmethod
    def core(q, k, v, context):
        return masked_attention(4 * normalize(q, dim=-1), normalize(k, dim=-1), v, context)


class SquaredReLU(nn.Module):
    def __init__(self, dim, width):
        super().__init__()
        self.w_in, self.w_out = Linear(dim, width), Linear(width, dim)

    def forward(self, x_BSD, context):
        return self.w_out(self.w_in(x_BSD).relu().square()), None


@dataclass(frozen=True, kw_only=True)
class Features(Part):
    divided = {"num_features": "tp"}  # noqa: RUF012
    num_features: int
    weights = property(lambda self: {
        "w_in.weight": Weight((self.num_features, self.hidden_size), FROZEN),
        "w_out.weight": Weight((self.hidden_size, self.num_features), ROWWISE)})  # fmt: skip

    def build(self, kernels, moe):
        return SquaredReLU(self.hidden_size, self.num_features)


class Toy(Architecture):
    kinds = (CosineAttention, Features)
    num_features: int


KEYS = {**COMMON_DEFAULTS, "vocab_size": 264, "max_position_embeddings": 64, "intermediate_size": 1}
NAMES = {f"layers.{{layer}}.mlp.w_{x}": f"model.layers.{{layer}}.ffn.{x}" for x in ("in", "out")}
MAP = (*DENSE, *(Rename(ours, theirs) for ours, theirs in NAMES.items()))
KEYS |= {"d_ffn": 8}
OWN = {"num_features": "d_ffn"}
register(Family("toy", Toy, "ToyModel", KEYS, MAP, OWN, activation="relu2"))
