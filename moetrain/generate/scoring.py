"""Scores texts on one device with a reward model, as trained by ``train.objective reward``.

    model = RewardModel("outputs/MODEL-pairs/hf")
    model.score([{"prompt": "Is 7 prime?", "completion": " Yes."}])     # [1.73]

Records are read as in training, so a text has the same tokens as in training.

Left out on purpose: models that need several devices.

Legend: N texts of a pass, T tokens of all of them.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from moetrain.config import ConfigError
from moetrain.config.sources import shortened
from moetrain.data.cache import encoded
from moetrain.data.chat import ChatTemplate
from moetrain.data.documents import Document
from moetrain.data.messages import BadLineError
from moetrain.data.records import RecordReader, has_answer
from moetrain.data.tokenizer import Tokenizer, load_tokenizer
from moetrain.models.hf.config import architecture_from_hf
from moetrain.models.hf.files import CONFIG, read_json, resolve
from moetrain.models.hf.load import load_hf
from moetrain.models.transformer import Inputs
from moetrain.train.reward import last_places

_NOT_SCORED = ("label", "kto_tag", "weight")
"""Fields of records that affect training on an answer, but not its score."""

_MERGED = (
    "give the folder that their run writes with checkpoint.save_hf yes, OUTPUT_DIR/hf, which has "
    "them merged"
)
"""The remedy that an error names for adapters of a reward model."""


class RewardModel:
    """A reward model with its tokenizer.

    Attributes:
        model: the model. Tokens ``arch.pad_token_id`` at the end of a text are padding: the score
            is taken at the last other token.
        tokenizer: the tokenizer of the checkpoint.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        device: str | torch.device = "auto",
        dtype: str = "auto",
        max_tokens: int = 16384,
    ) -> None:
        """Load a checkpoint of transformers' ``*ForSequenceClassification`` with one label.

        Args:
            path: a folder (``output_dir/hf`` of a run, or the run's folder) or a hub id.
            device: a device of torch; auto: cuda if there is a GPU.
            dtype: dtype of weights and arithmetic; auto: bfloat16 on CUDA, float32 on a CPU. Scores
                are fp32.
            max_tokens: largest number of tokens in one pass, unless a single text has more.

        Raises ConfigError: the checkpoint does not load, has no tokenizer, or is no reward model.
        """
        folder = resolve(path, field="path", for_adapters=_MERGED)
        arch = architecture_from_hf(read_json(folder / CONFIG))
        if not arch.num_labels:
            problem = f"{os.fspath(path)!r} is a language model, which has no head that scores"
            raise ConfigError("path", f"{problem}; train one with train.objective reward")
        self.device = _device_of(device)
        auto = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        wanted = auto if dtype == "auto" else getattr(torch, dtype)
        self.tokenizer: Tokenizer = load_tokenizer(str(folder), arch.vocab_size)
        self.model = load_hf(folder, dtype=wanted, device=self.device)
        self.max_tokens = max_tokens
        self._reader = RecordReader(template=ChatTemplate.of(self.tokenizer), train_on="last")

    def encode(self, record: Mapping[str, Any]) -> list[int]:
        """Return the tokens of ``record``, the same as in training.

        A record has ``prompt`` and ``completion``, each a text or a list of messages, or it
        has another form of docs/data.md that ends with an answer: ``messages``, ``conversations``,
        ``instruction`` and ``output``, or a whole ``text``. A blank ``completion`` is an answer
        that ends at once.

        Raises BadLineError: the record has no such form, or is too long for the model.
        """
        kept = {key: value for key, value in record.items() if key not in _NOT_SCORED}
        if "chosen" in kept:
            problem = f"a record is a pair, which has two rewards: {shortened(kept)}"
            raise BadLineError(f"{problem}; give each answer as `completion`")
        is_dialogue = not kept.keys().isdisjoint(("messages", "conversations"))
        if is_dialogue and "completion" not in kept and not has_answer(kept):
            problem = f"a record's last turn is no answer: {shortened(kept)}"
            raise BadLineError(f"{problem}; end with the assistant's turn, or give `completion`")
        found: list[Document] = self._reader.documents(kept)
        if len(found) != 1:
            problem = f"becomes {len(found)} texts" if found else "has no text"
            raise BadLineError(f"a record {problem}: {shortened(kept)}")
        ((_, ids_T, _),) = encoded(found, self.tokenizer)
        if len(ids_T) > (most := self.model.arch.reach):
            problem = f"a record has {len(ids_T)} tokens, more than the model's {most} positions"
            raise BadLineError(f"{problem}: {shortened(kept)}; leave it out, or cut it")
        return ids_T.astype(np.int64).tolist()

    def score(self, records: Sequence[Mapping[str, Any]]) -> list[float]:
        """Return the reward of each record. Raises BadLineError, as :meth:`encode` does."""
        return self.score_tokens([self.encode(record) for record in records])

    @torch.no_grad()
    def score_tokens(self, texts: Sequence[Sequence[int]]) -> list[float]:
        """Return the reward of each text, given as a non-empty list of token ids."""
        found: list[float] = []
        with self._on_device():
            for some in self._passes(texts):
                found += self._scores(some)
        return found

    def _on_device(self) -> AbstractContextManager[Any]:
        # The current device is per thread, and a new thread starts on the first GPU.
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def _passes(self, texts: Sequence[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
        """Divide ``texts`` into batches of at most ``max_tokens`` tokens."""
        some: list[Sequence[int]] = []
        for ids in texts:
            if some and sum(map(len, some)) + len(ids) > self.max_tokens:
                yield some
                some = []
            some.append(ids)
        if some:
            yield some

    def _scores(self, texts: Sequence[Sequence[int]]) -> list[float]:
        """Return the scores of texts, which are packed into one row."""
        device = self.device
        lengths = torch.tensor([0, *map(len, texts)])
        tokens_1T = torch.tensor([[i for ids in texts for i in ids]], device=device)
        positions_1T = torch.cat([torch.arange(len(ids)) for ids in texts])[None].to(device)
        cu_seqlens = lengths.cumsum(0).to(device, torch.int32)
        inputs = Inputs(tokens_1T, positions_1T, cu_seqlens=cu_seqlens)
        hidden_1TD, _ = self.model.backbone(inputs)
        places_N = last_places(tokens_1T, cu_seqlens, None, self.model.arch.pad_token_id)
        score = self.model.vocabulary.scores
        return score(hidden_1TD[0], self.model.head_weight, places_N)[:, 0].tolist()


def _device_of(given: str | torch.device) -> torch.device:
    """Return the device that ``given`` names. Raises ConfigError: there is no such device."""
    count = torch.cuda.device_count()
    if given == "auto":
        return torch.device("cuda" if count else "cpu")
    try:
        device = torch.device(given)
    except RuntimeError:
        raise ConfigError("device", f"{given!r} is no device; use cpu, cuda or cuda:N") from None
    if device.type == "cuda" and (device.index or 0) >= count:
        problem = f"{str(given)!r}, but torch sees {count} CUDA devices; use cpu"
        raise ConfigError("device", f"{problem} or a number below {count}" if count else problem)
    return device
