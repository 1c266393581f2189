"""The updates of an RL step: deals samples to ranks, packs them into rows, scores and trains them.

Every denominator is that of the global batch, so the split among ranks does not change the result.
"""

import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from itertools import islice
from typing import Any, NamedTuple
from urllib.error import HTTPError
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

import numpy as np
import torch

from moetrain.config import Config, ConfigError
from moetrain.config.environment import user_cache_dir
from moetrain.config.sections import ModelSection
from moetrain.config.sources import RunFailed, shortened
from moetrain.data.packing import IGNORE_INDEX
from moetrain.data.tokenizer import Tokenizer
from moetrain.losses.balancing import RoutingStats
from moetrain.losses.policy import kl_estimate
from moetrain.models.transformer import Transformer
from moetrain.parallel.mesh import Sliceable, TensorSlice
from moetrain.parallel.world import World
from moetrain.rl.losses import PolicyObjective, corrected
from moetrain.train.engine import Engine
from moetrain.train.estimates.memory import teacher_of
from moetrain.train.objectives import Objective, Pretraining, token_losses
from moetrain.train.preferences import score
from moetrain.train.samples import DealtSamples, RolloutBatch, Sample

_AT_ONCE = 32
"""Micro-batches that a rank sends to a served teacher at once."""
_BUSY = (None, 429, 502, 503)
"""HTTP statuses of a server that is starting or busy; None: there is no answer."""
_TEXT = "The quick brown fox: 0123456789 {}\n"


class Learned(NamedTuple):
    """The result of one step's updates."""

    skipped: torch.Tensor
    """0-d bool, on the device: True if an update was skipped."""
    routing: RoutingStats | None
    """This rank's routing statistics; None: there is no MoE layer, or nothing was learned."""
    row: dict[str, float]
    """Metrics by name."""


class Learner:
    """Updates an engine's weights on samples."""

    def __init__(self, config: Config, engine: Engine) -> None:
        self.config, self.engine, self.world = config, engine, engine.world
        own = PolicyObjective(config.rl)
        self.policy = Pretraining.of(config, engine.arch, own=own, is_rl=True)
        self.reference: dict[str, torch.Tensor] = {}
        """This rank's part of the reference policy's weights, in host memory."""
        self.teacher: ServedTeacher | LoadedTeacher | None = None
        if config.rl.is_teacher_served:
            self.teacher = ServedTeacher(config, self.world)
        elif config.rl.teacher is not None:
            self.teacher = LoadedTeacher(config, config.rl.teacher, engine)
        self.compared = self.differing = 0
        """``compared``: number of tokens, of all ranks, that the trainer scored with the same
        weights that generated them. ``differing``: number of these tokens whose log-probability
        does not equal generation's bit for bit."""

    def deal(self, samples: Sequence[Sample]) -> DealtSamples:
        """Deal ``samples``, the longest first, so that ranks get similar lengths. Collective."""
        longest_first = sorted(range(len(samples)), key=lambda i: -len(samples[i].tokens))
        return DealtSamples(
            self.engine,
            samples,
            order=longest_first,
            seq_len=self.config.data.seq_len,
            micro_batch_size=self.config.train.micro_batch_size,
        )

    def update(
        self, batches: Sequence[RolloutBatch], objective: Objective[RolloutBatch], lr: float
    ) -> Learned:
        """Make one update by ``objective``; its terms become the metrics."""
        totals = self.engine.forward_backward(batches, objective)
        outcome = self.engine.step(lr)
        # The host waits here, once an update, for the figures that are logged.
        row = {name: term.item() for name, term in totals.terms.items()}
        row["grad_norm"] = outcome.grad_norm.item()
        return Learned(outcome.skipped, totals.routing, row)

    def learn(self, samples: Sequence[Sample], version: int, lr: float) -> Learned:
        """Make the policy's updates on ``samples``, which are those of all ranks.

        ``version``: the version of the weights before the updates.
        """
        settings = self.config.rl
        # 1. Rows: each update has a part of the groups.
        numbers = sorted({sample.group for sample in samples})
        updates = [
            self.deal([sample for sample in samples if sample.group in some]).batches
            for some in np.array_split(numbers, settings.updates_per_rollout)
            if len(some)
        ]
        # 2. What the loss needs beside generation's log-probabilities.
        batches, row = self.scored([batch for update in updates for batch in update], version)
        if settings.kl_coef:
            pairs = zip(batches, self._at_reference(batches), strict=True)
            batches = [batch._replace(reference_BS=found_BS) for batch, found_BS in pairs]
        if self.teacher is not None:
            batches = self.teacher.judged(batches)
        # 3. The updates, and the means of their metrics.
        remaining = iter(batches)
        parts = [list(islice(remaining, len(update))) for update in updates]
        done = [self.update(part, self.policy, lr) for part in parts]
        rows = [learned.row for learned in done]
        # The mismatch that an update computes also contains the effect of earlier updates.
        names = [name for name in rows[0] if name != "mismatch"]
        row |= {name: sum(r[name] for r in rows) / len(rows) for name in names}
        routings = [learned.routing for learned in done if learned.routing is not None]
        return Learned(
            torch.stack([learned.skipped for learned in done]).any(),
            RoutingStats.together(routings) if routings else None,
            row,
        )

    def scored(
        self, batches: list[RolloutBatch], version: int
    ) -> tuple[list[RolloutBatch], dict[str, float]]:
        """Add the trainer's log-probabilities if the loss needs them beside generation's.

        Also returns metrics of the mismatch between trainer and generation, for tokens that the
        current weights have chosen and for scored tokens of each older version.

        The first batch of each rank is always scored. The others are scored, if the loss uses the
        result, in any of these cases:

        - A token of a first batch has other bits in training than in generation.
        - A batch has a token that older weights chose.
        - Generation's weights are quantised differently (``rl.generator_dtype``), or it attends
          within latents (``rl.generator_cache``).
        - Tokens may have read a cache of older weights (``rl.keep_cache``).

        In all other cases their log-probabilities are taken to equal generation's bit for bit.
        """
        settings = self.config.rl
        first = score(self.engine, batches[:1], settings.temperature)
        seen = self._compare(batches[:1], first, version)
        old = sum(int(((b.versions_BS >= 0) & (b.versions_BS != version)).sum()) for b in batches)
        differs = self.config.generation_differs or settings.keep_cache
        differs = self.world.sum_rows(seen[0, 1] + old) > 0 or differs
        corrects = settings.importance_of != "none" or settings.mask != "none"
        if differs and (settings.ratio == "proximal" or corrects):
            rest = score(self.engine, batches[1:], settings.temperature)
            seen += self._compare(batches[1:], rest, version)
            batches = corrected(batches, first + rest, settings)
        by_age = self.world.sum_rows(seen).tolist()
        apart, differing, number = by_age[0]
        self.compared += int(number)
        self.differing += int(differing)
        row = {"mismatch": apart / number, "mismatch_share": differing / number} if number else {}
        if len(by_age) > 1:
            row |= {f"mismatch/age_{age}": k3 / n for age, (k3, _, n) in enumerate(by_age) if n}
        return batches, row

    def _compare(
        self, batches: Sequence[RolloutBatch], scored: Sequence[torch.Tensor], version: int
    ) -> torch.Tensor:
        """Compare the log-probabilities ``scored`` [B, S] with those of generation.

        Returns fp64 [ages, 3]. Row i is for tokens that weights i versions old chose, up to
        ``rl.max_staleness``: the sum of the KL estimate k3, the number of tokens whose
        log-probabilities differ, and the number of tokens.
        """
        sums = torch.zeros(self.config.rl.max_staleness + 1, 3, dtype=torch.float64)
        for batch, logprobs_BS in zip(batches, scored, strict=True):
            for age, row in enumerate(sums):
                is_one_BS = batch.targets_BS != IGNORE_INDEX
                is_one_BS &= batch.versions_BS == version - age
                mine, theirs = logprobs_BS[is_one_BS], batch.logprobs_BS[is_one_BS]
                apart = kl_estimate("k3", theirs.double(), mine.double()).sum()
                row += torch.stack([apart, (mine != theirs).sum(), is_one_BS.sum()])
        return sums.to(self.world.device)

    # ---- the reference -------------------------------------------------------------------------

    def kl_sums(self, samples: Sequence[Sample]) -> list[float]:
        """Return each sample's KL from the reference, summed over its actions. Collective."""
        dealt = self.deal(samples)
        kls = []
        for batch, found_BS in zip(dealt.batches, self._at_reference(dealt.batches), strict=True):
            kl_BS = kl_estimate(self.config.rl.kl, batch.logprobs_BS, found_BS)
            kls.append(torch.where(batch.targets_BS != IGNORE_INDEX, kl_BS, 0))
        return dealt.by_sample(kls, lambda kl: kl.sum().item())

    def keep_reference(self) -> None:
        """Copy the present weights to host memory, as the reference."""
        self.reference = _copied(self._values())

    def _at_reference(self, batches: Sequence[RolloutBatch]) -> list[torch.Tensor]:
        """Return log-probabilities [B, S] under the reference.

        While this runs, the reference's weights replace the policy's in the model.
        """
        values = self._values()
        now = _copied(values)
        self.engine.before_change()
        _copy(self.reference, values)
        try:
            return score(self.engine, batches, self.config.rl.temperature)
        finally:
            _copy(now, values)

    def reference_state(self) -> dict[str, TensorSlice]:
        """Return this rank's part of the reference, for a checkpoint."""
        parts = self.engine.state()["model"]
        return {k: part._replace(tensor=self.reference[k]) for k, part in parts.items()}

    def load_reference(self, state: Mapping[str, Sliceable]) -> None:
        """Load this rank's part of the reference from a checkpoint."""
        parts = self.engine.state()["model"]
        self.reference = {name: state[name][part.box] for name, part in parts.items()}

    def _values(self) -> dict[str, torch.Tensor]:
        """Return this rank's part of the trained parameters, and all buffers, by name."""
        self.engine.fsdp.settle()
        members = self.engine.fsdp.members.items()
        trained = {name: member.local for name, member in members if member.rule.trainable}
        return trained | dict(self.engine.model.named_buffers())


class LoadedTeacher:
    """A teacher whose frozen weights are beside the policy's, on the same ranks and in the same
    layout."""

    def __init__(self, config: Config, path: str, policy: Engine) -> None:
        """Load the model at ``path``."""
        arch, other, self.settings = teacher_of(path), Config(), config.rl
        with torch.device("meta"):
            weights = Transformer(arch).named_parameters()
        # Frozen matrices have neither gradients nor moments. Each block keeps a norm to train.
        matrices = tuple(name for name, weight in weights if weight.ndim > 1)
        own = {"model": ModelSection(path=path), "lora": other.lora, "optim": other.optim}
        own["parallel"] = config.parallel.model_copy(update={"reshard_after_forward": True})
        own["train"] = config.train.model_copy(update={"freeze": matrices, "mtp_weight": 0.0})
        # The user meant the settings for the policy, so those without effect here may be dropped.
        settings = config.model_copy(update=own).proposed()
        self.engine = Engine(settings, arch, policy.world)
        self.tokens = min(arch.vocab_size, policy.arch.vocab_size)

    def judged(self, batches: Sequence[RolloutBatch]) -> list[RolloutBatch]:
        """Add the teacher's log-probabilities for every target. Collective."""
        engine, temperature = self.engine, self.settings.temperature
        number = self.settings.teacher_top_k
        own = [batch._replace(routes_BSLK=None) for batch in batches]  # those were the policy's

        def finish(hidden_BSD: torch.Tensor, _: object, batch: RolloutBatch) -> torch.Tensor:
            lse_T = token_losses(engine.model, hidden_BSD, batch, temperature).lse_T
            logits = engine.model.vocabulary.logits(hidden_BSD, engine.model.head_weight)
            top_TK = logits.flatten(0, -2)[:, : self.tokens].float().topk(number)
            logprobs_TK = top_TK.values / temperature - lse_T[:, None]
            both_T2K = torch.stack((top_TK.indices.float(), logprobs_TK), 1)  # ids are below 2^24
            return both_T2K.unflatten(0, batch.targets_BS.shape)

        if not number:
            found = score(engine, own, temperature)
        else:
            shapes = [(*batch.targets_BS.shape, 2, number) for batch in batches]
            found = engine.collect(own, finish, shapes)
        engine.fsdp.release()
        name = "teacher_BS2K" if number else "teacher_BS"
        return [b._replace(**{name: x}) for b, x in zip(batches, found, strict=True)]


class _NoRedirects(HTTPRedirectHandler):
    """Makes a redirect an error, since following it would send the access token elsewhere."""

    def redirect_request(self, *args: object, **more: object) -> None:
        return None


class ServedTeacher:
    """The server at ``rl.teacher``, which gives log-probabilities of tokens over HTTP.

    Requests have the form of vLLM's: ``/v1/completions`` with ``prompt_logprobs``, one for each
    sample. Of the ranks that have the same rows, one sends the requests, and all get the answers.
    JSON keeps all bits of the log-probabilities.

    Left out on purpose: temperatures other than 1. The servers give log-probabilities at
    temperature 1 only.
    """

    def __init__(self, config: Config, world: World | None = None) -> None:
        """``world``: the ranks that call :meth:`judged`, all of them; None: only :meth:`check` is
        called."""
        self.world, self.settings, self.seq_len = world, config.rl, config.data.seq_len
        self.number, self.patience, self.model = config.rl.teacher_top_k, 0.0, ""
        self._open = build_opener(ProxyHandler({}), _NoRedirects()).open

    def check(self, tokenizer: Tokenizer) -> None:
        """Raise ConfigError if the server cannot judge a row of ``tokenizer``'s tokens."""
        ids = tokenizer.encode_batch([_TEXT])[0].ids.tolist()
        row = [*(ids * self.seq_len)[: self.seq_len], tokenizer.vocab_size - 1]
        read, judged = self._scores(_TEXT, 0), self._scores(row, self.number)
        least, temperature = min(map(len, judged)), self.settings.temperature
        if [next(iter(scores)) for scores in read][1 - len(ids) :] != ids[1:]:
            problem = "has other tokens than data.tokenizer; serve one with the same tokenizer"
        elif least < self.number:
            problem = f"gives {least} likeliest tokens, fewer than rl.teacher_top_k {self.number}"
            problem += "; lower rl.teacher_top_k"
        elif temperature != 1:
            problem = f"has probabilities at temperature 1, not rl.temperature {temperature}"
            problem += "; set rl.temperature 1, or name a checkpoint"
        else:
            return
        raise self._error(problem)

    def judged(self, batches: Sequence[RolloutBatch]) -> list[RolloutBatch]:
        """Add the teacher's log-probabilities for every target. Collective.

        Raises RunFailed: the server no longer answers, or refuses a request.
        """
        world, found = self.world, None
        assert world is not None
        first = world.gather(world.data_rank).index(world.data_rank)
        self.patience = self.settings.step_timeout  # the server may be started again
        if world.rank == first:
            try:
                with ThreadPoolExecutor(_AT_ONCE) as pool:
                    found = list(pool.map(self._values, batches))
            except ConfigError as error:
                found = str(error)
        parts: list[Any] = world.gather(found)
        for part in parts:
            if isinstance(part, str):
                raise RunFailed(part)
        name = "teacher_BS2K" if self.number else "teacher_BS"
        return [b._replace(**{name: x}) for b, x in zip(batches, parts[first], strict=True)]

    def _values(self, batch: RolloutBatch) -> torch.Tensor:
        """Return fp32 log-probabilities [B, S], or ids and log-probabilities [B, S, 2, K].

        Positions that predict nothing have 0.
        """
        tokens_T, targets_T = batch.tokens_BS.flatten(), batch.targets_BS.flatten()
        values = torch.zeros(len(tokens_T), *((2, self.number) if self.number else ()))
        for _, start, length in batch.spans:
            text, last = tokens_T[start : start + length].tolist(), targets_T[start + length - 1]
            text += [] if last == IGNORE_INDEX else [int(last)]
            for i, scores in enumerate(self._scores(text, self.number)):
                top = sorted(scores, key=lambda token: -scores[token])[: self.number]
                pair = [top, [scores[token] for token in top]]
                values[start + i] = torch.tensor(pair if top else scores[text[i + 1]])
        return values.unflatten(0, batch.tokens_BS.shape)

    def _scores(self, prompt: str | list[int], number: int) -> list[dict[int, float]]:
        """Return log-probabilities by token id, for each token of ``prompt`` but the first.

        They are those of the token itself, and of the ``number`` likeliest tokens at its position.
        """
        try:
            self.model = self.model or self._ask("models")["data"][0]["id"]
            asked = {"model": self.model, "prompt": prompt, "prompt_logprobs": number}
            reply = self._ask("completions", asked | {"max_tokens": 1, "temperature": 0})
            scored = reply["choices"][0]["prompt_logprobs"][1:]
            return [{int(token): x["logprob"] for token, x in one.items()} for one in scored]
        except (LookupError, TypeError, AttributeError):
            problem = "answers without prompt_logprobs; serve it by moetrain.serve or vLLM"
            raise self._error(problem) from None

    def _ask(self, path: str, body: object = None) -> Any:
        """Send a request, and return the JSON of the answer.

        If the server is busy or does not answer, the request is repeated for ``patience`` seconds.

        Raises ConfigError: there is no answer, or the server refuses the request.
        """
        url = str(self.settings.teacher).rstrip("/").removesuffix("/v1")
        headers, file = {"Content-Type": "application/json"}, user_cache_dir() / "serve.token"
        try:
            if file.exists():
                headers["Authorization"] = f"Bearer {file.read_text('ascii').strip()}"
        except (OSError, ValueError) as error:
            raise self._error(f"needs the token in {file}, which cannot be read: {error}") from None
        data, began = None if body is None else json.dumps(body).encode(), time.monotonic()
        while True:
            try:
                request = Request(f"{url}/v1/{path}", data, headers)
                with self._open(request, timeout=self.settings.step_timeout) as reply:
                    return json.load(reply)
            except (OSError, HTTPException, ValueError) as error:
                code = error.code if isinstance(error, HTTPError) else None
                problem = f"does not answer ({error}); serve it by python -m moetrain.serve"
                if isinstance(error, HTTPError):
                    said = " ".join(error.read(300).decode("utf-8", "replace").split())
                    asked = f"rows of data.seq_len {self.seq_len} with {self.number} likeliest"
                    problem = f"refuses {asked} tokens (status {code}): {said}; serve one that can"
                    if error.code in range(300, 400):
                        there = shortened(error.headers.get("location", ""))
                        problem = f"redirects to {there}, where no token is sent; name the server"
                if code not in _BUSY or time.monotonic() - began > self.patience:
                    raise self._error(problem) from None
            time.sleep(1.0)

    def _error(self, problem: str) -> ConfigError:
        return ConfigError("rl.teacher", f"{self.settings.teacher!r} {problem}")


def _copied(values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return copies of ``values`` in host memory."""
    return {name: value.to("cpu", copy=True) for name, value in values.items()}


@torch.no_grad()
def _copy(source: Mapping[str, torch.Tensor], target: Mapping[str, torch.Tensor]) -> None:
    for name, value in target.items():
        value.copy_(source[name])
