"""cuDNN's ragged attention; no other module uses ``nvidia-cudnn-frontend``.

cuDNN takes packed documents as a batch of padded ones, ``[N, heads, length bound, d]``. A device
tensor, the "ragged offset", says at which element of memory each document begins. So nothing is
copied, and the host does not wait for the device. A cuDNN graph is built for one set of sizes, and
building takes 0.04 s. So the number of documents and the length bound are rounded up, and graphs
are cached.

Queries may be the last tokens of documents that have more keys: masks are then aligned to the
bottom right. Keys of no document get gradients of 0.

Left out on purpose: autograd and checks of shapes
(:mod:`moetrain.kernels.attention.attention`).

Legend: T tokens, H query heads, G key/value heads, d width of a query and a key, v of a value, N
documents.
"""

# pyright: reportArgumentType=false

import functools
import importlib
import importlib.metadata
import logging
import re
from typing import Any, NamedTuple

import torch

from moetrain.runtime.backend import tl, triton
from moetrain.runtime.graphs import document_bucket

_PACKAGE = "nvidia-cudnn-frontend"
_OLDEST = (1, 28)
"""Older versions give the ragged backward too small a workspace: its gradients are silently 0."""


def _installed_version() -> str | None:
    """Return the package's version, None if it is absent; the package is imported at first use."""
    try:
        return importlib.metadata.version(_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None


_INSTALLED = _installed_version()
_DTYPES = (torch.bfloat16, torch.float16)
MAX_HEAD_DIM, _HEAD_DIM_STEP = 256, 8
"""The widest heads, and the multiple of widths, that the backward takes on Hopper."""

_MIN_LENGTH = 128
"""Rounding the length bound up to this costs nothing (16,384 tokens on one H200: within 1 %)."""

# A graph's tensors by our names. cuDNN knows them by number.
_INPUTS = ("q", "k", "v", "o", "lse", "do")
_GRADS = ("dq", "dk", "dv")
_OFFSETS = ("q_offsets", "k_offsets", "v_offsets", "o_offsets", "lse_offsets")
_LENGTHS = ("lengths", "k_lengths")
_UID = {name: i for i, name in enumerate((*_INPUTS, *_GRADS, *_OFFSETS, *_LENGTHS), start=1)}


def runs(device: torch.device, dtype: torch.dtype | None, width: int = 0) -> bool:
    """Return True if cuDNN takes heads of up to ``width`` elements of ``dtype`` on ``device``.

    The device must be Hopper or newer; a ``dtype`` of None, unknown, gives False.
    """
    is_known = dtype in _DTYPES and width <= MAX_HEAD_DIM
    if device.type != "cuda" or not is_known or _INSTALLED is None:
        return False
    if _is_too_old(_INSTALLED):
        _warn_of_age()
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def _is_too_old(version: str) -> bool:
    return tuple(int(n) for n in re.findall(r"\d+", version)[:2]) < _OLDEST


@functools.cache
def _warn_of_age() -> None:
    logging.getLogger("moetrain").warning(
        "kernels.attention: %s %s is not used, because its gradients are wrong before version %s; "
        "pip install 'moetrain[gpu]' installs a later one",
        _PACKAGE,
        _INSTALLED,
        ".".join(map(str, _OLDEST)),
    )


def require(device: torch.device, dtype: torch.dtype, *widths: int) -> None:
    """Raise ValueError, with the remedy, if cuDNN cannot attend over heads of ``widths`` here."""
    bad = [n for n in widths if n > MAX_HEAD_DIM or n % _HEAD_DIM_STEP]
    if device.type != "cuda" or dtype not in _DTYPES:
        found, takes = f"{dtype} on {device}", "bf16 or fp16 on CUDA"
    elif bad:
        found, takes = f"head width {bad[0]}", f"multiples of {_HEAD_DIM_STEP} to {MAX_HEAD_DIM}"
    elif _INSTALLED is None:
        raise ValueError(
            f'attention backend "cudnn" needs {_PACKAGE}, which is not installed; '
            "pip install 'moetrain[gpu]', or choose another backend"
        )
    elif _is_too_old(_INSTALLED):
        raise ValueError(
            f'attention backend "cudnn" needs {_PACKAGE} 1.28 or later, and the gradients of '
            f"{_INSTALLED} are wrong; pip install 'moetrain[gpu]', or choose another backend"
        )
    else:
        return
    raise ValueError(f'attention backend "cudnn" was given {found}; it takes {takes}')


def forward(
    q_THd: torch.Tensor,
    k_TGd: torch.Tensor,
    v_TGv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    *,
    max_seqlen: int,
    window: int | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``o_THv`` and ``lse_HT`` (fp32); all inputs are contiguous.

    The arguments are those of :func:`~moetrain.kernels.attention.attention.attention_packed`.
    """
    tokens, heads, _ = q_THd.shape
    o_THv = q_THd.new_empty(tokens, heads, v_TGv.shape[2])
    lse_HT = q_THd.new_empty(heads, tokens, dtype=torch.float32)
    has_key_ends = cu_seqlens_k is not None
    sizes = _graph_sizes(q_THd, v_TGv, cu_seqlens, has_key_ends, max_seqlen, window, scale)
    tensors = {"q": q_THd, "k": k_TGd, "v": v_TGv, "o": o_THv, "lse": lse_HT}
    tensors |= document_layout(cu_seqlens, cu_seqlens_k, sizes.documents, sizes.elements)
    _execute(_forward_graph(sizes), tensors)
    return o_THv, lse_HT


def backward(
    do_THv: torch.Tensor,
    q_THd: torch.Tensor,
    k_TGd: torch.Tensor,
    v_TGv: torch.Tensor,
    o_THv: torch.Tensor,
    lse_HT: torch.Tensor,
    cu_seqlens: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    *,
    max_seqlen: int,
    window: int | None,
    scale: float,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k and v; all inputs are contiguous."""
    has_key_ends = cu_seqlens_k is not None
    # Keys that no query sees get gradients of 0.
    empty = torch.zeros_like if has_key_ends else torch.empty_like
    dq_THd, dk_TGd, dv_TGv = torch.empty_like(q_THd), empty(k_TGd), empty(v_TGv)
    sizes = _graph_sizes(q_THd, v_TGv, cu_seqlens, has_key_ends, max_seqlen, window, scale)
    tensors = {"q": q_THd, "k": k_TGd, "v": v_TGv, "o": o_THv, "lse": lse_HT, "do": do_THv}
    tensors |= {"dq": dq_THd, "dk": dk_TGd, "dv": dv_TGv}
    tensors |= document_layout(cu_seqlens, cu_seqlens_k, sizes.documents, sizes.elements)
    _execute(_backward_graph(sizes, deterministic), tensors)
    return dq_THd, dk_TGd, dv_TGv


class TokenElements(NamedTuple):
    """Elements of one token in each tensor."""

    q: int
    k: int
    v: int
    o: int


class _GraphSizes(NamedTuple):
    """The sizes that a cuDNN graph is built for."""

    device: torch.device
    dtype: torch.dtype
    tokens: int
    keys: int
    has_key_ends: bool
    """True: the keys' documents have other ends than the queries'."""
    documents: int
    """Rounded up."""
    length: int
    """Bound of every document's length, rounded up."""
    heads: int
    kv_heads: int
    width: int
    v_width: int
    window: int | None
    scale: float

    @property
    def elements(self) -> TokenElements:
        """Elements of one token in each tensor."""
        return TokenElements(
            q=self.heads * self.width,
            k=self.kv_heads * self.width,
            v=self.kv_heads * self.v_width,
            o=self.heads * self.v_width,
        )


class _CudnnGraph(NamedTuple):
    graph: Any
    """cudnn.pygraph"""
    workspace_bytes: int


def _graph_sizes(
    q_THd: torch.Tensor,
    v_TGv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    has_key_ends: bool,
    max_seqlen: int,
    window: int | None,
    scale: float,
) -> _GraphSizes:
    tokens, heads, width = q_THd.shape
    keys, kv_heads, v_width = v_TGv.shape
    length = max(_MIN_LENGTH, 1 << (max_seqlen - 1).bit_length())
    return _GraphSizes(
        device=q_THd.device,
        dtype=q_THd.dtype,
        tokens=tokens,
        keys=keys,
        has_key_ends=has_key_ends,
        documents=document_bucket(cu_seqlens.shape[0] - 1),
        length=length,
        heads=heads,
        kv_heads=kv_heads,
        width=width,
        v_width=v_width,
        window=None if window is None or window >= length else window,
        scale=scale,
    )


def document_layout(
    cu_seqlens: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    documents: int,
    elements: TokenElements,
) -> dict[str, torch.Tensor]:
    """Compute each document's lengths and offsets in one launch, padded to ``documents``.

    Returns them by the names of :data:`_OFFSETS` and :data:`_LENGTHS`. Lengths are in tokens,
    [documents], in the dtype of ``cu_seqlens``. Offsets are in elements, int64 [documents + 1],
    because they may pass 2^31.
    """
    offsets = cu_seqlens.new_empty(len(_OFFSETS), documents + 1, dtype=torch.int64)
    lengths = cu_seqlens.new_empty(len(_LENGTHS), documents)
    _layout_kernel[(1,)](
        cu_seqlens,
        cu_seqlens if cu_seqlens_k is None else cu_seqlens_k,
        offsets,
        lengths,
        cu_seqlens.shape[0] - 1,
        elements.q,
        elements.k,
        elements.v,
        elements.o,
        1,  # in lse
        DOCUMENTS=documents,
        BLOCK=triton.next_power_of_2(documents + 1),
    )
    return dict(zip((*_OFFSETS, *_LENGTHS), (*offsets, *lengths), strict=True))


@triton.jit(do_not_specialize=["given"])
def _layout_kernel(
    cu_seqlens,
    cu_seqlens_k,
    offsets,
    lengths,
    given,
    q_elements,
    k_elements,
    v_elements,
    o_elements,
    lse_elements,
    DOCUMENTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    document = tl.arange(0, BLOCK)
    # Documents of the padding are empty, and begin at the end of the last document.
    this = tl.minimum(document, given)
    next_one = tl.minimum(document + 1, given)
    start = tl.load(cu_seqlens + this)
    end = tl.load(cu_seqlens + next_one)
    start_k = tl.load(cu_seqlens_k + this)
    end_k = tl.load(cu_seqlens_k + next_one)
    tl.store(lengths + document, end - start, document < DOCUMENTS)
    tl.store(lengths + DOCUMENTS + document, end_k - start_k, document < DOCUMENTS)
    wide = start.to(tl.int64)
    wide_k = start_k.to(tl.int64)
    mask = document <= DOCUMENTS
    row = offsets + document
    tl.store(row, wide * q_elements, mask)
    tl.store(row + (DOCUMENTS + 1), wide_k * k_elements, mask)
    tl.store(row + 2 * (DOCUMENTS + 1), wide_k * v_elements, mask)
    tl.store(row + 3 * (DOCUMENTS + 1), wide * o_elements, mask)
    tl.store(row + 4 * (DOCUMENTS + 1), wide * lse_elements, mask)


@functools.cache
def _handle(device: torch.device) -> Any:
    with torch.cuda.device(device):
        return importlib.import_module("cudnn").create_handle()


def _execute(graph: _CudnnGraph, tensors: dict[str, torch.Tensor]) -> None:
    cudnn = importlib.import_module("cudnn")
    device = tensors["q"].device
    workspace = torch.empty(graph.workspace_bytes, dtype=torch.uint8, device=device)
    with torch.cuda.device(device):
        handle = _handle(device)
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
        by_uid = {_UID[name]: tensor for name, tensor in tensors.items()}
        graph.graph.execute(by_uid, workspace, handle=handle)


class _Builder:
    """A cuDNN graph under construction, with its tensors by our names."""

    def __init__(self, sizes: _GraphSizes) -> None:
        self.sizes, self.cudnn = sizes, importlib.import_module("cudnn")
        types = self.cudnn.data_type
        self.dtype = types.BFLOAT16 if sizes.dtype == torch.bfloat16 else types.HALF
        self.graph = self.cudnn.pygraph(
            io_data_type=self.dtype,
            intermediate_data_type=types.FLOAT,
            compute_data_type=types.FLOAT,
            handle=_handle(sizes.device),
        )
        self.offsets = {
            name: self._input(name, [sizes.documents + 1, 1, 1, 1], [1] * 4, types.INT64)
            for name in _OFFSETS
        }
        lengths = {
            name: self._input(name, [sizes.documents, 1, 1, 1], [1] * 4, types.INT32)
            for name in _LENGTHS[: 1 + sizes.has_key_ends]
        }
        alignment = self.cudnn.diagonal_alignment
        self.mask = {
            "attn_scale": sizes.scale,
            "use_padding_mask": True,
            "seq_len_q": lengths["lengths"],
            "seq_len_kv": lengths["k_lengths" if sizes.has_key_ends else "lengths"],
            "diagonal_alignment": alignment.BOTTOM_RIGHT
            if sizes.has_key_ends
            else alignment.TOP_LEFT,
            "diagonal_band_right_bound": 0,
        }
        if sizes.window is not None:
            self.mask["diagonal_band_left_bound"] = sizes.window

    def _input(self, name: str, dims: list[int], strides: list[int], dtype: Any) -> Any:
        return self.graph.tensor(
            name=name, uid=_UID[name], dim=dims, stride=strides, data_type=dtype
        )

    def _layout(self, name: str) -> tuple[list[int], list[int], Any, str]:
        """Return dims, strides (document, head, token, element), dtype and offsets' name."""
        s = self.sizes
        if name == "lse":
            # [H, T] is 1 % faster in the backward than [T, H].
            dims = [s.documents, s.heads, s.length, 1]
            strides = [s.heads * s.tokens, s.tokens, 1, 1]
            return dims, strides, self.cudnn.data_type.FLOAT, "lse_offsets"
        kind = name.removeprefix("d")
        heads = s.heads if kind in "qo" else s.kv_heads
        width = s.width if kind in "qk" else s.v_width
        dims = [s.documents, heads, s.length, width]
        strides = [s.length * heads * width, width, heads * width, 1]
        return dims, strides, self.dtype, f"{kind}_offsets"

    def inputs(self, *names: str) -> dict[str, Any]:
        """Add ragged inputs of these names."""
        found = {}
        for name in names:
            *description, offsets = self._layout(name)
            found[name] = self._input(name, *description)
            found[name].set_ragged_offset(self.offsets[offsets])
        return found

    def build(self, **outputs: Any) -> _CudnnGraph:
        """Build the graph with ragged outputs of these names."""
        for name, tensor in outputs.items():
            dims, strides, dtype, offsets = self._layout(name)
            tensor.set_uid(_UID[name]).set_output(True).set_data_type(dtype)
            tensor.set_dim(dims).set_stride(strides).set_ragged_offset(self.offsets[offsets])
        self.graph.validate()
        self.graph.build_operation_graph()
        modes = self.cudnn.heur_mode
        self.graph.create_execution_plans([modes.A, modes.FALLBACK])
        self.graph.check_support()
        self.graph.build_plans()
        return _CudnnGraph(self.graph, self.graph.get_workspace_size())


@functools.cache
def _forward_graph(sizes: _GraphSizes) -> _CudnnGraph:
    builder = _Builder(sizes)
    o, lse = builder.graph.sdpa(
        name="forward", generate_stats=True, **builder.inputs("q", "k", "v"), **builder.mask
    )
    return builder.build(o=o, lse=lse)


@functools.cache
def _backward_graph(sizes: _GraphSizes, deterministic: bool) -> _CudnnGraph:
    builder = _Builder(sizes)
    inputs = builder.inputs(*_INPUTS)
    dq, dk, dv = builder.graph.sdpa_backward(
        name="backward",
        dO=inputs.pop("do"),
        stats=inputs.pop("lse"),
        # The scratch memory is for as many tokens; without these it would be documents * length.
        max_total_seq_len_q=sizes.tokens,
        max_total_seq_len_kv=sizes.keys,
        use_deterministic_algorithm=deterministic,
        **inputs,
        **builder.mask,
    )
    return builder.build(dq=dq, dk=dk, dv=dv)
