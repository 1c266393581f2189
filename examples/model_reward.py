"""A reward model as the reward of reinforcement learning.

    REWARD_MODEL=outputs/MODEL-pairs/hf python -m moetrain.rl --model.path MODEL \\
        --rl.env jsonl --rl.prompts prompts.jsonl --rl.reward examples/model_reward.py:score

``score`` is called for each answer while others are being generated. Answers that arrive while the
reward model is busy wait, and then form one batch. Its own tokenizer and chat template write the
prompt with the answer.

REWARD_MODEL    folder or hub id of the reward model
REWARD_CHAT     yes, as rl.chat yes: a prompt that is a text becomes a user's turn
REWARD_DEVICE   cpu, cuda:1, ...; unset: the GPU of this rank, or the CPU

Each rank that generates holds the whole reward model, which ``--dry_run`` does not count. Left out
on purpose: a reward model on several devices, and a server for it.
"""

import asyncio
import os
import threading
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue

import torch

from moetrain import RewardModel
from moetrain.data.messages import BadLineError

_own = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"
model = RewardModel(os.environ["REWARD_MODEL"], device=os.environ.get("REWARD_DEVICE", _own))
_waiting: SimpleQueue[tuple[dict, Future[float]]] = SimpleQueue()


async def score(line: dict, answer: str) -> float:
    """Return the reward of ``answer`` to the prompt of ``line``."""
    done: Future[float] = Future()
    _waiting.put((_record(line, answer), done))
    return await asyncio.wrap_future(done)


def _record(line: dict, answer: str) -> dict:
    """Return the prompt of ``line`` with ``answer``, as a training record."""
    prompt = line["messages"] if line.get("prompt") is None else line["prompt"]
    if isinstance(prompt, str) and os.environ.get("REWARD_CHAT") == "yes":
        prompt = [{"role": "user", "content": prompt}]
    others = ("tools", "documents", "chat_template_kwargs")
    return {"prompt": prompt, "completion": answer} | {k: line[k] for k in others if k in line}


def _work() -> None:
    """Score all waiting answers in one batch, forever."""
    while True:
        batch = [_waiting.get()]
        with suppress(Empty):
            while True:
                batch.append(_waiting.get_nowait())
        batch = [(record, done) for record, done in batch if done.set_running_or_notify_cancel()]
        texts: dict[Future[float], list[int]] = {}
        for record, done in batch:
            try:
                texts[done] = model.encode(record)
            except BadLineError as error:  # for example, it is too long
                done.set_exception(error)
        try:
            scores = model.score_tokens([*texts.values()])
        except Exception as error:  # noqa: BLE001 - whatever it is, those that wait are to hear it
            for done in texts:
                done.set_exception(error)
            continue
        for done, reward in zip(texts, scores, strict=True):
            done.set_result(reward)


threading.Thread(target=_work, daemon=True).start()
