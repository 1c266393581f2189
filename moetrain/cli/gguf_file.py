"""``moetrain checkpoint export-gguf``: a Hugging Face folder as a file in llama.cpp's format GGUF.

The file has the model's sizes, its tokenizer with the chat template, and its tensors under the
names of the library ``gguf`` (the extra ``gguf``). Experts of a layer are stacked to one tensor.
Heads' rows of queries and keys of Llama and Mixtral are in another order, since llama.cpp rotates
neighbours::

    file's row 2 i + k of a head = row k D / 2 + i        k = 0, 1, D the head's width

Left out on purpose: other families, and tokenizers that are not byte-level BPE with a split that
llama.cpp knows. They are refused by name.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from moetrain.config import ConfigError, logger
from moetrain.config.files import write_atomically
from moetrain.data.chat import ChatTemplate
from moetrain.data.tokenizer import Tokenizer, load_tokenizer
from moetrain.models.architecture import Architecture
from moetrain.models.family import Piece
from moetrain.models.hf.config import architecture_from_hf
from moetrain.models.hf.files import CONFIG, read_json
from moetrain.models.hf.load import check_checkpoint, filled, opened
from moetrain.models.rope_scaling import RopeScaling
from moetrain.models.transformer import Transformer

GgufType = Literal["bf16", "f16", "f32", "q8_0"]
"""Types of matrices in the file; vectors, biases and routers are in fp32."""
_ARCHITECTURES = {
    "llama": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gpt_oss": "gpt-oss",
}
"""The names that llama.cpp gives to families."""
_BIASED = ("qwen2", "gpt_oss")
"""Families for which llama.cpp adds biases."""
_REMEDY = "convert the folder by llama.cpp's convert_hf_to_gguf.py"
_ENDS = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = _SHORT + r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SHORT}?|"
_CASED += rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SHORT}?|"
_SPLITS = {
    _WORDS + r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _ENDS: "qwen2",
    _WORDS + r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _ENDS: "llama-bpe",
    _CASED + r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _ENDS: "gpt-4o",
}
"""Regular expressions that split texts into words, and the names that llama.cpp gives to them."""
_STRETCHED = {"default": None, "linear": "linear", "yarn": "yarn", "llama3": None}
"""llama.cpp's names for variants of rotary embeddings; None: it needs none."""
_ROPE_FREQS = "rope_freqs.weight"
_IGNORES_MERGES = ("llama-bpe",)
"""Splits with which llama.cpp takes a word that is a token as it is, without merges."""


class _Outgoing(NamedTuple):
    """A tensor of the file."""

    name: str
    shape: tuple[int, ...]
    type: Any
    """Its ``gguf.GGMLQuantizationType``."""
    pieces: Sequence[Piece]
    """The pieces of one parameter that it consists of: one, or one for each expert."""
    is_stacked: bool = False
    heads: int | None = None
    """The number of heads whose rows change places; None: rows stay."""


def export_gguf(folder: Path, out: Path, type: GgufType) -> int:
    """Write the model in ``folder`` to the file ``out``, and return the number of tensors.

    Memory holds one parameter. ``out`` is replaced once the whole file is written.

    Raises ConfigError: the library is not installed, or the file cannot express the model or its
    tokenizer.
    """
    try:
        import gguf
    except ModuleNotFoundError:
        problem = "needs the library gguf; install it by pip install 'moetrain[gguf]'"
        raise ConfigError("export-gguf", problem) from None
    arch = architecture_from_hf(read_json(folder / CONFIG))
    _check(folder, arch)
    source = check_checkpoint(folder, arch)
    with torch.device("meta"):
        model = Transformer(arch)
    model.source = source
    tokenizer = _Vocabulary.of(folder, load_tokenizer(str(folder), arch.vocab_size), arch)
    outgoing = list(_planned(model, arch, type))
    factors = _rope_factors(arch)
    own = {name: parameter.shape for name, parameter in model.named_parameters()}

    def write(temporary: Path) -> None:
        writer = gguf.GGUFWriter(temporary, _ARCHITECTURES[arch.family])
        _add_sizes(writer, arch, type)
        tokenizer.add(writer)
        if factors is not None:
            writer.add_tensor_info(_ROPE_FREQS, factors.shape, factors.dtype, factors.nbytes)
        for one in outgoing:
            writer.add_tensor_info(
                one.name,
                one.shape,
                np.dtype(np.float32),
                _num_bytes(one),
                raw_dtype=one.type,
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        if factors is not None:
            writer.write_tensor_data(factors)
        with opened(source, arch) as parts:
            whole, read = torch.empty(0), ""
            for one in outgoing:
                if (parameter := one.pieces[0].parameter) != read:
                    read = parameter
                    whole = filled(parts, {read: torch.zeros(own[read])})[read]
                writer.write_tensor_data(gguf.quants.quantize(_values(one, whole), one.type))
        writer.close()

    write_atomically(out, write)
    return len(outgoing) + (factors is not None)


def _check(folder: Path, arch: Architecture) -> None:
    """Raise ConfigError for what llama.cpp's architectures of these names do not compute."""
    name = _ARCHITECTURES.get(arch.family)
    biases = arch.mlp_bias or ((arch.qkv_bias or arch.out_bias) and arch.family not in _BIASED)
    rope = arch.rope
    fixed = (rope.attention_factor, rope.mscale, rope.mscale_all_dim) != (None, None, None)
    # llama.cpp's graph for GPT-OSS has windows in every other layer, and the clamp in its code.
    own = {"swiglu_limit": 7.0, "swiglu_alpha": 1.702} if name == "gpt-oss" else {}
    windows = arch.sliding_windows
    alternates = not any(windows[1::2]) and len({*windows[::2], None}) == 2
    problems = {
        f"family {arch.family}; {', '.join(_ARCHITECTURES)} are exported": name is None,
        "a reward model's head": bool(arch.num_labels),
        f"rotary embeddings stretched by {rope.kind}": rope.kind not in _STRETCHED
        or (rope.kind == "llama3" and name != "llama"),
        "yarn with a factor of its own on attention": rope.kind == "yarn" and fixed,
        "sliding windows": name != "gpt-oss" and any(windows),
        "windows in other layers than every second one": name == "gpt-oss"
        and not (alternates and all(windows[::2])),
        "biases": biases,
        "tied embeddings": name == "gpt-oss" and arch.tie_embeddings,
        "layers without experts": bool(arch.moe_layers) and not all(arch.moe_layers),
        "router weights that are not normalised (norm_topk_prob false)": bool(arch.num_experts)
        and not arch.norm_topk_prob,
    } | {
        f"{key} {getattr(arch, key)} instead of {value}": getattr(arch, key) != value
        for key, value in own.items()
    }
    if found := [problem for problem, has in problems.items() if has]:
        said = f"{str(folder)!r} has what this export does not write: {found[0]}"
        raise ConfigError("PATH", f"{said}; {_REMEDY}")
    if rope.kind == "yarn" and not rope.truncate:
        sizes = arch.rope_theta, arch.head_dim, arch.max_positions
        whole = rope.model_copy(update={"truncate": True})
        apart = (rope.frequencies(*sizes)[0] - whole.frequencies(*sizes)[0]).abs().max().item()
        if apart > 0:
            said = "%s: llama.cpp rounds yarn's range to whole pairs (truncate true), and the model"
            said += " does not: angles differ by up to %.2g a position"
            logger.warning(said, folder, apart)


def _planned(model: Transformer, arch: Architecture, type: GgufType) -> Iterator[_Outgoing]:
    """Yield the tensors of the file, those of a parameter together."""
    import gguf

    kinds = gguf.GGMLQuantizationType
    names = gguf.get_tensor_name_map(
        next(x for x, n in gguf.MODEL_ARCH_NAMES.items() if n == _ARCHITECTURES[arch.family]),
        arch.num_layers,
    )
    parameters = dict(model.named_parameters())
    groups: dict[tuple[str, str], list[Piece]] = {}
    for piece in model.pieces():
        if not piece.is_copy:
            groups.setdefault((piece.parameter, _key(piece)), []).append(piece)
    for (parameter, key), pieces in groups.items():
        name = names.get_name(key, try_suffixes=(".weight", ".bias"))
        assert name is not None, key  # the families that are exported have no other tensors
        first = pieces[0].place
        shape = tuple(parameters[parameter][first].shape)
        is_stacked = bool(first) and isinstance(first[0], int)
        kind = getattr(kinds, type.upper())
        if type == "q8_0" and shape[-1] % 32:
            kind = kinds.F16  # as llama.cpp's converter
        if len(shape) == 1 or name.endswith(".bias") or parameter.endswith(".router.weight"):
            kind = kinds.F32
        heads = {"attn.wq.weight": arch.num_heads, "attn.wk.weight": arch.num_kv_heads}
        own = (
            heads.get(parameter.split(".", 2)[-1])
            if _ARCHITECTURES[arch.family] == "llama"
            else None
        )
        stack = (len(pieces),) * is_stacked
        yield _Outgoing(name, (*stack, *shape), kind, pieces, is_stacked, own)


def _key(piece: Piece) -> str:
    """Return the file tensor's name without an expert's number, in the form that gguf knows.

    GPT-OSS's files have gate and up projection of all experts in one tensor, and names without
    ``.weight``.
    """
    key = re.sub(r"\.experts\.\d+\.", ".experts.", piece.hf_name)
    if key.endswith("_bias"):
        key = key.removesuffix("_bias") + ".bias"
    elif not key.endswith((".weight", ".bias")):
        key += ".weight"
    if ".gate_up_proj." in key:
        rows = piece.within[1]
        assert isinstance(rows, slice)
        key = key.replace("gate_up_proj", "up_proj" if rows.start else "gate_proj")
    return key


def _rope_factors(arch: Architecture) -> np.ndarray | None:
    """Return what llama.cpp divides angles by (fp32 [pairs]), for Llama 3.1's rotary embeddings."""
    if arch.rope.kind != "llama3":
        return None
    sizes = arch.rope_theta, arch.head_dim, arch.max_positions
    plain, _ = RopeScaling().frequencies(*sizes)
    return (plain / arch.rope.frequencies(*sizes)[0]).numpy()


def _values(one: _Outgoing, whole: torch.Tensor) -> np.ndarray:
    """Return the values of a tensor of the file, in fp32, from its whole parameter."""
    parts = [whole[piece.place] for piece in one.pieces]
    value = torch.stack(parts) if one.is_stacked else parts[0]
    if one.heads is not None:
        value = value.unflatten(0, (one.heads, 2, -1)).transpose(1, 2).flatten(0, 2)
    return value.contiguous().numpy()


def _num_bytes(one: _Outgoing) -> int:
    import gguf

    elements, size = gguf.GGML_QUANT_SIZES[one.type]
    return int(np.prod(one.shape)) // elements * size


def _add_sizes(writer: Any, arch: Architecture, type: GgufType) -> None:
    """Add what llama.cpp's converter writes of the architecture."""
    import gguf

    writer.add_type("model")
    writer.add_block_count(arch.num_layers)
    writer.add_context_length(arch.max_positions)
    writer.add_embedding_length(arch.hidden_size)
    writer.add_feed_forward_length(arch.intermediate_size)
    writer.add_head_count(arch.num_heads)
    writer.add_head_count_kv(arch.num_kv_heads)
    writer.add_key_length(arch.head_dim)
    writer.add_value_length(arch.head_dim)
    writer.add_rope_dimension_count(arch.head_dim)
    writer.add_rope_freq_base(arch.rope_theta)
    rope = arch.rope
    if (kind := _STRETCHED[rope.kind]) is not None:
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope.factor)
    if rope.kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope.original_max_positions or arch.max_positions)
        writer.add_rope_scaling_yarn_beta_fast(rope.beta_fast)
        writer.add_rope_scaling_yarn_beta_slow(rope.beta_slow)
    if (window := next(filter(None, arch.sliding_windows), None)) is not None:
        writer.add_sliding_window(window)
    writer.add_layer_norm_rms_eps(arch.norm_eps)
    writer.add_vocab_size(arch.vocab_size)
    if arch.num_experts:
        writer.add_expert_count(arch.num_experts)
        writer.add_expert_used_count(arch.num_experts_per_token)
        writer.add_expert_feed_forward_length(arch.moe_intermediate_size)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    most = "ALL_F32" if type == "f32" else f"MOSTLY_{type.upper()}"
    writer.add_file_type(gguf.LlamaFileType[most])


class _Vocabulary(NamedTuple):
    """The tokenizer of a file."""

    split: str
    """llama.cpp's name for the split of texts into words."""
    tokens: Sequence[str]
    types: Sequence[int]
    """The ``gguf.TokenType`` of each token."""
    merges: Sequence[str]
    tokenizer: Tokenizer

    @classmethod
    def of(cls, folder: Path, tokenizer: Tokenizer, arch: Architecture) -> "_Vocabulary":
        """Read the tokenizer of ``folder``; ConfigError: llama.cpp does not know its kind."""
        from gguf import TokenType

        said = json.loads(tokenizer.whole_json())
        model, normalizer = said["model"], said.get("normalizer") or {}
        split = _split_of(said.get("pre_tokenizer") or {})
        is_known = model.get("type") == "BPE" and not model.get("byte_fallback")
        is_known &= bool(model.get("ignore_merges")) == (split in _IGNORES_MERGES)
        if not is_known or split is None or normalizer.get("type", "NFC") != "NFC":
            problem = f"{str(folder)!r} has a tokenizer of a kind that this export does not write"
            raise ConfigError("PATH", f"{problem}; {_REMEDY}")
        tokens = [f"[PAD{i}]" for i in range(arch.vocab_size)]  # rows without a token
        types = [int(TokenType.UNUSED)] * arch.vocab_size
        for token, i in model["vocab"].items():
            tokens[i], types[i] = token, int(TokenType.NORMAL)
        for added in said.get("added_tokens", ()):
            kind = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
            tokens[added["id"]], types[added["id"]] = added["content"], int(kind)
        merges = [x if isinstance(x, str) else " ".join(x) for x in model["merges"]]
        return cls(split, tokens, types, merges, tokenizer)

    def add(self, writer: Any) -> None:
        """Add the tokenizer to a file."""
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(self.split)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        writer.add_token_merges(self.merges)
        ids = self.tokenizer.special_ids
        writer.add_eos_token_id(self.tokenizer.eos_id)
        stops = map(self.tokenizer.added_tokens.get, ChatTemplate.of(self.tokenizer).stops)
        if others := [i for i in stops if i is not None and i != self.tokenizer.eos_id]:
            writer.add_eot_token_id(others[0])  # llama.cpp ends a text there, too
        if (pad := ids.get("pad_token")) is not None:
            writer.add_pad_token_id(pad)
        bos = self.tokenizer.bos_ids
        if (first := bos[0] if bos else ids.get("bos_token")) is not None:
            writer.add_bos_token_id(first)
        writer.add_add_bos_token(bool(bos))
        if self.tokenizer.chat_template is not None:
            writer.add_chat_template(self.tokenizer.chat_template)


def _split_of(said: Mapping[str, Any]) -> str | None:
    """Return llama.cpp's name for the split of a ``pre_tokenizer``; None: it has none."""
    steps = said.get("pretokenizers", [said])
    *before, last = steps
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        return None
    if not before:
        return "gpt-2" if last.get("use_regex", True) else None
    (first, *more) = before
    if not more and first == {"type": "Digits", "individual_digits": True}:
        return "smollm" if last.get("use_regex", True) else None
    if more or first.get("type") != "Split" or last.get("use_regex", True):
        return None
    pattern = first.get("pattern", {}).get("Regex")
    is_plain = first.get("behavior") == "Isolated" and not first.get("invert")
    return _SPLITS.get(pattern) if is_plain else None
