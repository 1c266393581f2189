"""``moetrain checkpoint export-gguf``: a Hugging Face folder as a file in llama.cpp's format GGUF.

The file has the model's sizes, its tokenizer with the chat template, and its tensors under the
names of the library ``gguf`` (the extra ``gguf``). Experts of a layer are stacked to one tensor.
Heads' rows of queries and keys of Llama are in another order, since llama.cpp rotates neighbours::

    file's row 2 i + k of a head = row k D / 2 + i        k = 0, 1, D the head's width

Left out on purpose: other families, stretched rotary embeddings, and tokenizers that are not
byte-level BPE with a split that llama.cpp knows. They are refused by name.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from moetrain.config import ConfigError
from moetrain.config.files import write_atomically
from moetrain.data.tokenizer import Tokenizer, load_tokenizer
from moetrain.models.architecture import Architecture
from moetrain.models.family import Piece
from moetrain.models.hf.config import architecture_from_hf
from moetrain.models.hf.files import CONFIG, read_json
from moetrain.models.hf.load import check_checkpoint, filled, opened
from moetrain.models.transformer import Transformer

GgufType = Literal["bf16", "f16", "q8_0"]
"""Types of matrices in the file; vectors and routers are in fp32."""
_ARCHITECTURES = {"llama": "llama", "qwen3": "qwen3", "qwen3_moe": "qwen3moe"}
"""The names that llama.cpp gives to families."""
_REMEDY = "convert the folder by llama.cpp's convert_hf_to_gguf.py"
_ENDS = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_SPLITS = {
    _WORDS + r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _ENDS: "qwen2",
    _WORDS + r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _ENDS: "llama-bpe",
}
"""Regular expressions that split texts into words, and the names that llama.cpp gives to them."""


class _Outgoing(NamedTuple):
    """A tensor of the file."""

    name: str
    shape: tuple[int, ...]
    type: Any
    """Its ``gguf.GGMLQuantizationType``."""
    pieces: Sequence[Piece]
    """The pieces of one parameter that it consists of: one, or one for each expert."""
    is_stacked: bool
    heads: int | None
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
    own = {name: parameter.shape for name, parameter in model.named_parameters()}

    def write(temporary: Path) -> None:
        writer = gguf.GGUFWriter(temporary, _ARCHITECTURES[arch.family])
        _add_sizes(writer, arch, type)
        tokenizer.add(writer)
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
        with opened(source, arch) as parts:
            whole, read = torch.empty(0), ""
            for one in outgoing:
                if (parameter := one.pieces[0].parameter) != read:
                    read = parameter
                    whole = filled(parts, {read: torch.zeros(own[read])})[read]
                writer.write_tensor_data(gguf.quants.quantize(_values(one, whole), one.type))
        writer.close()

    write_atomically(out, write)
    return len(outgoing)


def _check(folder: Path, arch: Architecture) -> None:
    """Raise ConfigError for what llama.cpp's architectures of these names do not compute."""
    problems = {
        f"family {arch.family}; {', '.join(_ARCHITECTURES)} are exported": arch.family
        not in _ARCHITECTURES,
        "a reward model's head": bool(arch.num_labels),
        f"rotary embeddings stretched by {arch.rope.kind}": arch.rope.kind != "default",
        "sliding windows": any(arch.sliding_windows),
        "biases": arch.qkv_bias or arch.out_bias or arch.mlp_bias,
        "layers without experts": bool(arch.moe_layers) and not all(arch.moe_layers),
        "router weights that are not normalised (norm_topk_prob false)": bool(arch.num_experts)
        and not arch.norm_topk_prob,
    }
    if found := [problem for problem, has in problems.items() if has]:
        said = f"{str(folder)!r} has what this export does not write: {found[0]}"
        raise ConfigError("PATH", f"{said}; {_REMEDY}")


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
        key = re.sub(r"\.experts\.\d+\.", ".experts.", piece.hf_name)
        if not piece.is_copy:
            groups.setdefault((piece.parameter, key), []).append(piece)
    for (parameter, key), pieces in groups.items():
        name = names.get_name(key, try_suffixes=(".weight", ".bias"))
        assert name is not None, key  # the families that are exported have no other tensors
        shape = tuple(parameters[parameter][pieces[0].place].shape)
        is_stacked = key != pieces[0].hf_name
        kind = getattr(kinds, type.upper())
        if type == "q8_0" and shape[-1] % 32:
            kind = kinds.F16  # as llama.cpp's converter
        if len(shape) == 1 or parameter.endswith(".router.weight"):
            kind = kinds.F32
        heads = {"attn.wq.weight": arch.num_heads, "attn.wk.weight": arch.num_kv_heads}
        own = heads.get(parameter.split(".", 2)[-1]) if arch.family == "llama" else None
        stack = (len(pieces),) * is_stacked
        yield _Outgoing(name, (*stack, *shape), kind, pieces, is_stacked, own)


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
    writer.add_layer_norm_rms_eps(arch.norm_eps)
    writer.add_vocab_size(arch.vocab_size)
    if arch.num_experts:
        writer.add_expert_count(arch.num_experts)
        writer.add_expert_used_count(arch.num_experts_per_token)
        writer.add_expert_feed_forward_length(arch.moe_intermediate_size)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{type.upper()}"])


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
    if more or first.get("type") != "Split" or last.get("use_regex", True):
        return None
    pattern = first.get("pattern", {}).get("Regex")
    is_plain = first.get("behavior") == "Isolated" and not first.get("invert")
    return _SPLITS.get(pattern) if is_plain else None
