"""cuDNN's ragged attention: the one place that names ``nvidia-cudnn-frontend``.

cuDNN takes packed documents as a batch of padded ones, ``[N, heads, length bound, d]``, whose
element offsets in memory are given by a device tensor (a "ragged offset"), so nothing is copied and
nothing waits for the device. A graph belongs to one set of sizes and takes 0.04 s to build; the
number of documents and the length bound are therefore rounded up and the graphs cached.

Queries may be the last tokens of documents that have more keys: masks are then aligned to the
bottom right, and keys that are nobody's get gradients of 0.

Left out: autograd and checks of shapes, see :mod:`moetrain.kernels.attention.attention`.

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
"""What the backward takes on Hopper."""

_MIN_LENGTH = 128
"""Rounding the length bound up to this costs nothing (16,384 tokens on one H200: within 1 %)."""

# A graph's tensors by our names; cuDNN knows them by number.
_INPUTS = ("q", "k", "v", "o", "lse", "do")
_GRADS = ("dq", "dk", "dv")
_OFFSETS = ("q_offsets", "k_offsets", "v_offsets", "o_offsets", "lse_offsets")
_LENGTHS = ("lengths", "k_lengths")
_UID = {name: i for i, name in enumerate((*_INPUTS, *_GRADS, *_OFFSETS, *_LENGTHS), start=1)}
_Ends = tuple[torch.Tensor, torch.Tensor | None]
"""``cu_seqlens`` of the queries' documents, and of the keys' (None: the same)."""


def runs(
    device: torch.device,
    dtype: torch.dtype | None,
    width: int = 0,
) -> bool:
    """Return True if cuDNN's path takes ``dtype`` (None, unknown: no) on ``device`` (Hopper on), in
    heads of up to ``width`` numbers."""
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
        "kernels.attention: %s %s is not used: before %s its gradients are wrong; pip install "
        "'moetrain[gpu]' brings the right one",
        _PACKAGE,
        _INSTALLED,
        ".".join(map(str, _OLDEST)),
    )


def require(device: torch.device, dtype: torch.dtype, *widths: int) -> None:
    """Raise ValueError, which names the remedy, if attention over heads of ``widths`` cannot run
    here."""
    bad = [n for n in widths if n > MAX_HEAD_DIM or n % _HEAD_DIM_STEP]
    if device.type != "cuda" or dtype not in _DTYPES:
        given = f"{dtype} on {device}"
        taken = "bf16 or fp16 on CUDA"
    elif bad:
        given = f"head width {bad[0]}"
        taken = f"multiples of {_HEAD_DIM_STEP} to {MAX_HEAD_DIM}"
    elif _INSTALLED is None:
        given = f"no package {_PACKAGE}"
        taken = "it: pip install moetrain[gpu]"
    elif _is_too_old(_INSTALLED):
        given = f"{_PACKAGE} {_INSTALLED}, whose gradients are wrong"
        taken = "1.28 or later: pip install moetrain[gpu]"
    else:
        return
    raise ValueError(f'attention backend "cudnn" was given {given}; it takes {taken}')


def forward(
    q_THd: torch.Tensor,
    k_TGd: torch.Tensor,
    v_TGv: torch.Tensor,
    ends: _Ends,
    max_seqlen: int,
    window: int | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``o_THv`` and ``lse_HT`` (fp32); all inputs are contiguous."""
    tokens, heads, _ = q_THd.shape
    width = v_TGv.shape[2]
    o_THv = q_THd.new_empty(tokens, heads, width)
    lse_HT = q_THd.new_empty(heads, tokens, dtype=torch.float32)
    sizes, layout = _prepare(q_THd, v_TGv, ends, max_seqlen, window, scale)
    tensors = {"q": q_THd, "k": k_TGd, "v": v_TGv, "o": o_THv, "lse": lse_HT}
    _execute(_forward_graph(sizes), tensors | layout)
    return o_THv, lse_HT


def backward(
    do_THv: torch.Tensor,
    q_THd: torch.Tensor,
    k_TGd: torch.Tensor,
    v_TGv: torch.Tensor,
    o_THv: torch.Tensor,
    lse_HT: torch.Tensor,
    ends: _Ends,
    max_seqlen: int,
    window: int | None,
    scale: float,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k and v; all inputs are contiguous."""
    saved = (q_THd, k_TGd, v_TGv, o_THv, lse_HT)
    # Keys that no query sees get gradients of 0.
    empty = torch.empty_like if ends[1] is None else torch.zeros_like
    grads = (torch.empty_like(q_THd), empty(k_TGd), empty(v_TGv))
    sizes, layout = _prepare(q_THd, v_TGv, ends, max_seqlen, window, scale)
    tensors = dict(zip((*_INPUTS, *_GRADS), (*saved, do_THv, *grads), strict=True))
    _execute(_backward_graph(sizes, deterministic), tensors | layout)
    return grads


class _GraphSizes(NamedTuple):
    device: torch.device
    dtype: torch.dtype
    tokens: int
    keys: int
    is_cut: bool
    documents: int
    length: int
    heads: int
    kv_heads: int
    width: int
    v_width: int
    window: int | None
    scale: float


class _CudnnGraph(NamedTuple):
    graph: Any  # cudnn.pygraph
    workspace_bytes: int


def _prepare(
    q_THd: torch.Tensor,
    v_TGv: torch.Tensor,
    ends: _Ends,
    max_seqlen: int,
    window: int | None,
    scale: float,
) -> tuple[_GraphSizes, dict[str, torch.Tensor]]:
    tokens, heads, width = q_THd.shape
    keys, kv_heads, v_width = v_TGv.shape
    documents = document_bucket(ends[0].shape[0] - 1)
    length = max(_MIN_LENGTH, 1 << (max_seqlen - 1).bit_length())
    window = None if window is None or window >= length else window
    shape = (tokens, keys, ends[1] is not None, documents, length, heads, kv_heads, width, v_width)
    sizes = _GraphSizes(q_THd.device, q_THd.dtype, *shape, window, scale)
    elements = heads * width, kv_heads * width, kv_heads * v_width, heads * v_width
    return sizes, _document_layout(ends, documents, *elements)


def _document_layout(
    ends: _Ends,
    documents: int,
    q: int,
    k: int,
    v: int,
    o: int,
) -> dict[str, torch.Tensor]:
    """Compute each document's length and offsets in one launch, padded to ``documents``.

    A token takes ``q``, ``k``, ``v`` and ``o`` numbers in the tensors of these names, and one in
    lse. Offsets are int64, [documents + 1]: they may pass 2^31.
    """
    cu_seqlens, cu_seqlens_k = ends
    offsets = cu_seqlens.new_empty(len(_OFFSETS), documents + 1, dtype=torch.int64)
    lengths = cu_seqlens.new_empty(len(_LENGTHS), documents)
    _layout_kernel[(1,)](
        cu_seqlens,
        cu_seqlens if cu_seqlens_k is None else cu_seqlens_k,
        offsets,
        lengths,
        cu_seqlens.shape[0] - 1,
        *(q, k, v, o, 1),
        documents,
        triton.next_power_of_2(documents + 1),
    )
    made = zip((*_OFFSETS, *_LENGTHS), (*offsets, *lengths), strict=True)
    return dict(made)


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
    # Past the last document given, all begin and end at its end.
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
    """One graph under construction: cuDNN's tensors by our names."""

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
            for name in _LENGTHS[: 1 + sizes.is_cut]
        }
        alignment = self.cudnn.diagonal_alignment
        self.mask = {
            "attn_scale": sizes.scale,
            "use_padding_mask": True,
            "seq_len_q": lengths["lengths"],
            "seq_len_kv": lengths["k_lengths" if sizes.is_cut else "lengths"],
            "diagonal_alignment": alignment.BOTTOM_RIGHT if sizes.is_cut else alignment.TOP_LEFT,
            "diagonal_band_right_bound": 0,
        }
        if sizes.window is not None:
            self.mask["diagonal_band_left_bound"] = sizes.window

    def _input(
        self,
        name: str,
        dims: list[int],
        strides: list[int],
        dtype: Any,
    ) -> Any:
        return self.graph.tensor(
            name=name,
            uid=_UID[name],
            dim=dims,
            stride=strides,
            data_type=dtype,
        )

    def _layout(self, name: str) -> tuple[list[int], list[int], Any, str]:
        """Dims, strides (document, head, token, element), dtype and offsets of a tensor."""
        s = self.sizes
        if name == "lse":
            # One head's tokens lie together: 1% faster in the backward than [T, H].
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
        found = {}
        for name in names:
            *description, offsets = self._layout(name)
            found[name] = self._input(name, *description)
            found[name].set_ragged_offset(self.offsets[offsets])
        return found

    def build(self, **outputs: Any) -> _CudnnGraph:
        """Build the graph, with the results as ragged outputs of these names."""
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
        max_total_seq_len_q=sizes.tokens,  # sizes the scratch memory, else documents * length
        max_total_seq_len_kv=sizes.keys,
        use_deterministic_algorithm=deterministic,
        **inputs,
        **builder.mask,
    )
    return builder.build(dq=dq, dk=dk, dv=dv)
