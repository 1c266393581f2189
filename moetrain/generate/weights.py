"""A generator beside a trainer: builds its model, and copies the trainer's weights into it.

Every rank generates with all weights except the experts of other ranks. With efsdp 1 each rank
casts its own experts, without communication. All other weights travel in all-gathers, in the dtype
in which the trainer computes: one for each parameter of experts, and one for the rest of an FSDP
unit, over all ranks that shard it for FSDP or tensor parallelism. No weight goes through fp32 or
the host. Parameters keep their addresses, because CUDA graphs refer to them. If the generator
stores quantised experts, each rank quantises its own experts before they travel. Each pipeline rank
then broadcasts the weights that it has gathered for its own stages, to the ranks at the same place
within the other stages, which have the same experts.

Worked example: a unit has the parameters a [4, 2] (colwise) and b [2] (shared), with dp_shard 2 and
tp 2. Ranks 0 and 1 are one tensor parallel group, ranks 2 and 3 the other::

    rank 0 sends  a[0:1], b[0:1]       rank 1 sends  a[2:3], b[1:2]
    rank 2 sends  a[1:2], nothing      rank 3 sends  a[3:4], nothing

:class:`Sampled` uses such a generator at the end of a training run.

Left out on purpose: a generator whose degree of expert parallelism is neither 1 nor the trainer's;
sending only the weights that have changed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from moetrain.config import Config
from moetrain.data.loader import Data
from moetrain.data.packing import IGNORE_INDEX
from moetrain.data.tokenizer import Tokenizer
from moetrain.generate.engine import Generator
from moetrain.generate.pages import Pages
from moetrain.generate.ranks import ExpertParallel
from moetrain.generate.request import Request, SamplingParams, chat_stops, end_ids
from moetrain.kernels.quant.groups import QUANT_FORMATS, quantise_matrices
from moetrain.models.architecture import Architecture
from moetrain.models.moe import Experts
from moetrain.models.transformer import Transformer, plan_model
from moetrain.parallel.apply import dispatcher_of
from moetrain.parallel.expert.deepep import DeepEP
from moetrain.parallel.fsdp.bucket import Member
from moetrain.parallel.mesh import Box, all_gather_start
from moetrain.runtime.arena import aligned
from moetrain.train.callbacks import Callback, RunView
from moetrain.train.engine import Engine


def blank(config: Config, arch: Architecture, dtype: torch.dtype) -> Transformer:
    """Build a generator's model on the meta device, in the dtypes in which it computes.

    Most parameters have ``dtype``. Experts are stored in ``rl.generator_dtype``, and the rules of a
    few other parameters name another dtype.
    """
    model, rules = plan_model(config, arch, dtype)
    for name, parameter in model.requires_grad_(False).named_parameters():
        parameter.data = parameter.data.to(rules[name].gather or dtype)
    format = QUANT_FORMATS.get(config.rl.generator_dtype)
    for module in model.modules():
        if format is not None and isinstance(module, Experts):
            module.store_as(format)
    model.compute_dtype = dtype
    return model


def replica(engine: Engine) -> tuple[Transformer, ExpertParallel | None]:
    """Build a generator's model on this rank, and its :class:`ExpertParallel`. Collective.

    The model shares the tensors of frozen parameters that the engine holds whole and in the right
    dtype. All other parameters are allocated, as zeros. Building the model never takes more memory
    than :func:`_replica_bytes`.

    The second result is None if this rank has all experts, as every rank has with ``rl.placement``
    apart.
    """
    config, world = engine.config, engine.world
    assert engine.model.compute_dtype is not None  # place_model has set it
    model, experts = blank(config, engine.arch, engine.model.compute_dtype), None
    if world.dims.ep > 1 and not config.rl.apart:
        dispatcher = dispatcher_of(engine.model)
        if isinstance(dispatcher, DeepEP):
            # A generator's step may have more tokens than the sizes of training allow.
            dispatcher = dispatcher.counted()
        elif config.kernels.precision != "bf16" or config.moe.redundant_experts:
            dispatcher = (
                None  # training's dispatcher quantises tokens, or sends them to redundant experts
            )
        group = world.meshes.expert_parameters.get_group("ep")
        experts = ExpertParallel(model, group, config.kernels.backend, dispatcher)
    for name, planned in list(model.named_parameters()):
        values = _frozen_here(engine, name)
        # The shapes differ where the engine's parameter holds the experts of this rank alone.
        if values is not None and values.shape == planned.shape:
            owner, _, key = name.rpartition(".")
            parameter = nn.Parameter(values, requires_grad=False)
            model.get_submodule(owner).register_parameter(key, parameter)
    model.source = engine.model.source
    device = world.device
    model._apply(lambda x: torch.zeros_like(x, device=device) if x.is_meta else x)
    return model, experts


def _replica_bytes(engine: Engine) -> int:
    """Return the bytes of the parameters that :func:`replica` allocates on a rank."""
    assert engine.model.compute_dtype is not None  # place_model has set it
    model, total = blank(engine.config, engine.arch, engine.model.compute_dtype), 0
    for name, planned in model.named_parameters():
        if _frozen_here(engine, name) is None:
            is_expert = engine.stages.rules[name].style == "expert"
            total += planned.nbytes // (engine.world.dims.ep if is_expert else 1)
    return total


def _frozen_here(engine: Engine, name: str) -> torch.Tensor | None:
    """Return the engine's own parameter if it is frozen, whole and in the replica's dtype."""
    member, rule = engine.fsdp.members.get(name), engine.stages.rules[name]
    if member is None or rule.trainable or rule.generated is not None:
        return None
    used = rule.gather or engine.model.compute_dtype
    is_like = member.local.dtype == used and not member.layout.is_gathered
    return member.local.detach() if is_like else None


class WeightUpdate:
    """Copies an engine's weights into a generator's model each time it is called."""

    def __init__(self, engine: Engine, generator: Generator) -> None:
        """Match the parameters of both models.

        Args:
            generator: its model is a :func:`replica`, or has all experts, in any dtype.

        Raises ValueError: the models have different parameters, or parameters of other shapes.
        """
        self.engine = engine
        self.generator = generator
        targets = dict(generator.model.named_parameters())
        if odd := set(targets) ^ set(engine.stages.rules):
            raise ValueError(
                f"WeightUpdate: generator and engine differ in parameters: {sorted(odd)[:3]}"
            )
        names = {id(member): name for name, member in engine.fsdp.members.items()}
        self._here: list[_Pair] = []
        """Parameters that are copied on this rank, without communication."""
        self._gathers: list[_Gather] = []
        for unit in engine.fsdp.units:
            pairs = [
                _Pair(m, targets[names[id(m)]].detach(), engine.model.compute_dtype)
                for m in unit.members
            ]
            generator.borrowed |= {names[id(p.member)] for p in pairs if p.is_one}
            self._add([pair for pair in pairs if not pair.is_one])
        self._from_stages = [
            (target, engine.stages.table[name].holders[0])
            for name, target in (*targets.items(), *generator.model.named_buffers())
            if engine.world.dims.pp > 1
        ]

    def _add(self, unit: Sequence[_Pair]) -> None:
        everyone = self.engine.world.meshes.shared_parameters
        shared: list[_Pair] = []
        for pair in unit:
            layout, shape = pair.member.layout, pair.shape
            is_expert, is_whole = layout.style == "expert", shape == layout.shape
            if not is_whole and not (is_expert and shape == layout.gathered_shape):
                problem = f"the generator's {pair.member.name} is {list(shape)}"
                raise ValueError(f"WeightUpdate: {problem}, and the engine's {list(layout.shape)}")
            if shape == layout.local_shape and not layout.is_gathered:
                self._here.append(pair)
            elif is_expert:  # experts are large; a gather of one parameter needs no second copy
                group = everyone.get_group("fsdp") if is_whole else layout.group
                self._gathers.append(_Gather([pair], group))
            else:
                shared.append(pair)
        if shared:
            self._gathers.append(_Gather(shared, everyone.get_group("fsdp")))

    @torch.no_grad()
    def __call__(self) -> None:
        """Update the weights. Unfinished requests continue with the new weights. Collective."""
        self.engine.fsdp.settle()
        for pair in self._here:
            pair.target.copy_(pair.local())
        gathers = self._gathers
        for gather, before in zip((*gathers, None), (None, *gathers), strict=True):
            if gather is not None:
                gather.start()
            if before is not None:  # ``before`` was in flight while ``gather`` was packed
                before.finish()
        buffers = dict(self.engine.model.named_buffers())
        for name, buffer in self.generator.model.named_buffers():
            if name in buffers:
                buffer.copy_(buffers[name])
        group, works = self.engine.stages.group, []
        for x, holder in self._from_stages:  # as bytes: gloo does not know every dtype
            bytes_N = x.detach().view(-1).view(torch.uint8)
            works.append(dist.broadcast(bytes_N, group=group, group_src=holder, async_op=True))
        for work in works:
            work.wait()
        self.generator.weights_changed()


@dataclass
class _Pair:
    """A parameter of the engine, and the generator's parameter that it is copied to."""

    member: Member
    target: torch.Tensor
    dtype: torch.dtype | None
    """The dtype in which the trainer computes."""

    @property
    def is_one(self) -> bool:
        """True if both are the same tensor, which :func:`replica` shares where it can."""
        return self.target.data_ptr() == self.member.local.data_ptr() and self.target.numel() > 0

    @property
    def shape(self) -> torch.Size:
        """The shape of the values that the target holds."""
        if self.member.rule.generated is None:
            return self.target.shape
        return torch.Size((len(self.target), *self.member.layout.shape[1:]))

    def local(self) -> torch.Tensor:
        """Return this rank's part of the parameter, quantised if the target is.

        Trained weights are rounded to the trainer's dtype first, since these are the weights that
        training uses. Of bf16's values one in 16 lies halfway between two of e4m3, and one in 64
        between two of e2m1. Quantised from fp32, half of them would move with the first update,
        however small: in SmolLM2-135M on average 200 times as far as its weights.
        """
        values, rule = self.member.read().detach(), self.member.rule
        if rule.generated is None:
            return values
        bytes_EB = self.target.new_empty(len(values), self.target.shape[1])
        trained = self.dtype if rule.quant_format is None else None
        quantise_matrices(rule.generated, values, bytes_EB, trained)
        return bytes_EB

    def places(self, ranks: Sequence[int]) -> list[Box]:
        """Return the slice of the target that each of ``ranks`` holds."""
        layout = self.member.layout
        offset = 0 if self.shape == layout.shape else layout.gathered_box[0].start
        boxes = [layout.box_of(rank) for rank in ranks]
        if self.member.rule.generated is not None:  # each expert's bytes are a row
            boxes = [(box[0], slice(0, self.target.shape[1])) for box in boxes]
        return [(slice(r.start - offset, r.stop - offset), *rest) for r, *rest in boxes]


class _Gather:
    """Parameters that travel in one all-gather, as bytes, because their dtypes may differ.

    If there is a single parameter, and its parts are consecutive in rank order, the all-gather
    writes into it directly. Otherwise each rank's message has a range for every parameter, which is
    as long as the largest part of any rank, and :meth:`finish` copies the parts out of the
    messages.
    """

    def __init__(self, pairs: Sequence[_Pair], group: dist.ProcessGroup) -> None:
        self.pairs, self.group = pairs, group
        ranks = dist.get_process_group_ranks(group)
        self._copies: list[tuple[torch.Tensor, int, int]] = []
        """Part of a target, the rank that sends it, and its first byte in that rank's message."""
        self._starts: list[int] = []
        """First byte of each parameter in a message."""
        size, self._is_direct = 0, False
        for pair in pairs:
            places = pair.places(ranks)
            parts = [pair.target[place] for place in places]
            self._is_direct = len(pairs) == 1 and _are_chunks(pair.target, places)
            self._starts.append(size)
            self._copies += [(part, rank, size) for rank, part in enumerate(parts)]
            size += aligned(max(part.nbytes for part in parts))
        self.size = pairs[0].target.nbytes // len(ranks) if self._is_direct else size
        """Bytes that each rank sends."""
        self._sent_N = self._received_WN = torch.empty(0)
        self._work: dist.Work | None = None

    def start(self) -> None:
        """Pack this rank's parts and start the all-gather."""
        if self._is_direct:
            (pair,) = self.pairs
            # This parameter, too, is sent as bytes: gloo does not know every dtype.
            self._sent_N = pair.local().to(pair.target).view(-1)
            self._received_WN = pair.target.view(self.group.size(), -1)
        else:
            self._sent_N = self.pairs[0].target.new_empty(self.size, dtype=torch.uint8)
            self._received_WN = self._sent_N.new_empty(self.group.size(), self.size)
            for pair, start in zip(self.pairs, self._starts, strict=True):
                local = pair.local()
                _part(self._sent_N, start, local.shape, pair.target.dtype).copy_(local)
        bytes_N, bytes_WN = (x.view(torch.uint8) for x in (self._sent_N, self._received_WN))
        _, self._work = all_gather_start(bytes_N, self.group, bytes_WN)

    def finish(self) -> None:
        """Wait for the all-gather and copy the parts to the targets."""
        assert self._work is not None  # started
        self._work.wait()
        if not self._is_direct:
            for part, rank, start in self._copies:
                part.copy_(_part(self._received_WN[rank], start, part.shape, part.dtype))
        self._sent_N = self._received_WN = self._sent_N.new_empty(0)
        self._work = None


def _part(bytes_N: torch.Tensor, start: int, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Return a view of the part of a message that begins at byte ``start``."""
    stop = start + shape.numel() * dtype.itemsize
    return bytes_N[start:stop].view(dtype).view(shape)


def _are_chunks(target: torch.Tensor, places: Sequence[Box]) -> bool:
    rows, *rest = target.shape
    each, left = divmod(rows, len(places))
    whole = tuple(slice(0, size) for size in rest)
    wanted = [(slice(r * each, (r + 1) * each), *whole) for r in range(len(places))]
    return not left and list(places) == wanted


# ---- the sample at the end of a training run -----------------------------------------------------

_PROMPT_TOKENS = 16  # taken from the start of a held-out row
_TEMPERATURE = 0.7
_SPARE = 3 * 2**30
"""Bytes on a GPU for one sequence's cache, and for two units in flight during the update."""


class Sampled(Callback):
    """Writes a sample to ``sample.txt`` at the end of a training run.

    The sample continues ``train.sample_prompt``, or the start of a held-out row. If the row begins
    with a question (tokens that are not learned), the sample is an answer to it, and its text keeps
    the special tokens of the chat template.

    If no sample can be made, the log says why, and the run still succeeds.
    """

    writes_sample = True

    def on_end(self, run: RunView, error: BaseException | None) -> None:
        trainer: Any = run  # a Trainer of moetrain.train.loop, which also has data
        if error is not None:
            return
        if not trainer.has_text:
            if run.config.is_users("train.sample_tokens"):
                run.say("no sample: there is no tokenizer (data.tokenizer)")
            return
        data: Data = trainer.data
        try:
            ids, is_answer = _prompt(data, run.config.train.sample_prompt)
            if not ids:
                raise ValueError("the prompt has no tokens")
            num_pages = -(-run.config.data.seq_len // Pages.SIZE)
            generator = generator_of(
                run.engine, data.tokenizer, num_pages=num_pages, max_sequences=1
            )
        except ValueError as problem:
            run.say(f"no sample: {problem} (train.sample_prompt, train.sample_tokens)")
            return
        WeightUpdate(run.engine, generator)()
        if not _continue(ids, generator, run.config, is_answer):
            run.say("no sample: the model's logits are not finite")
            return
        text = data.tokenizer.decode(ids, skip_special_tokens=not is_answer)
        if run.world.is_main:
            (run.folder / "sample.txt").write_text(text, "utf-8")
        run.say("sample:\n" + text)


def _prompt(data: Data, text: str | None) -> tuple[list[int], bool]:
    """Return the tokens to continue, and True if they are a question that is to be answered."""
    if text is not None:
        return data.tokenizer.encode_prompt(text), False
    row = (data.eval or data.train).row(0)
    first = int(np.argmax(row.targets_S != IGNORE_INDEX))  # target i is token i + 1
    number = first + 1 if first else _PROMPT_TOKENS
    return row.tokens_S[:number].tolist(), first > 0


def generator_of(
    engine: Engine,
    tokenizer: Tokenizer | None,
    *,
    num_pages: int | None = None,
    max_sequences: int = 64,
) -> Generator:
    """Build a generator for the model of ``engine``. Collective.

    Call :class:`WeightUpdate` to fill its weights. ``num_pages`` and ``max_sequences`` are passed
    to :class:`Generator`.

    Raises ValueError on every rank: a device has no room for the generator, or the model cannot
    generate.
    """
    engine.fsdp.release()
    needed, device = _replica_bytes(engine) + _SPARE, engine.world.device
    lacking = torch.tensor([float(_free_bytes(device) < needed)], device=device)
    if engine.world.sum_all(lacking).item() > 0:
        raise ValueError(
            f"a device has less free memory than the generator's {needed / 2**30:.1f} GiB"
        )
    model, experts = replica(engine)
    return Generator(
        model, tokenizer, num_pages=num_pages, max_sequences=max_sequences, experts=experts
    )


def _continue(ids: list[int], generator: Generator, config: Config, is_answer: bool) -> bool:
    """Append up to ``train.sample_tokens`` tokens to ``ids``. Return False for non-finite logits.

    Generation stops at an end token, which is appended only to an answer (``is_answer``). The model
    sees a window of at most ``data.seq_len`` tokens. When the text fills the window, generation
    continues from the text's last half window. Every rank makes the same requests. Collective.
    """
    train, tokenizer = config.train, generator.tokenizer
    assert tokenizer is not None
    window = min(config.data.seq_len, generator.longest)
    start, end = len(ids), len(ids) + train.sample_tokens
    stop_ids = end_ids(generator.model, tokenizer) if is_answer else (tokenizer.eos_id,)
    stop = chat_stops(tokenizer) if is_answer else ()
    while len(ids) < end:
        seen = ids if len(ids) < window else ids[-(window // 2) :]
        params = SamplingParams(
            max_tokens=min(end - len(ids), window - len(seen)),
            temperature=_TEMPERATURE,
            # Each window has its own random numbers.
            seed=(train.seed + len(ids) - start) % 2**63,
            stop_ids=stop_ids,
            stop=stop,
        )
        ((done,),) = generator.generate([Request("sample", tuple(seen), params)])
        if not all(map(math.isfinite, done.logprobs)):
            return False
        if done.finish_reason == "stop":
            ids += done.tokens if is_answer else done.tokens[:-1]
            break
        ids += done.tokens
    return True


def _free_bytes(device: torch.device) -> float:
    if device.type != "cuda":
        return math.inf
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]
