"""Helpers of tests/rl/test_agents.py that other tests use too."""

import time

from openai import OpenAI

from moetrain.config import Config
from moetrain.data.tokenizer import ByteTokenizer
from moetrain.generate.engine import Generator
from moetrain.models.transformer import Transformer
from moetrain.rl.agents import AgentEnvironment
from moetrain.rl.collect import Collector
from moetrain.rl.envs import Prompts
from tests.lib.generators import ARCH

TOKENIZER = ByteTokenizer()
SEARCH = {"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}


class Watched(Generator):
    """Keeps the tokens of every step in the order of their arrival."""

    def __init__(self):
        model = Transformer(ARCH.model_copy(update={"max_positions": 1024}))
        model.init_weights(std=0.3, seed=0)
        super().__init__(model, TOKENIZER)
        self.said = {}

    def step(self):
        completions = super().step()
        for completion in completions:
            said = self.said.setdefault(completion.request_id, [])
            new = slice(-completion.num_new, None)
            said += zip(completion.tokens[new], completion.logprobs[new], strict=True)
        return completions


def collector_of(run, lines=None, generator=None, **values):
    values = {"max_tokens": 60, "step_timeout": 20, **values}
    words = [f"rl.{name}={value}" for name, value in values.items()]
    settings = Config.load("debug", words, environ={}).rl
    generator = Watched() if generator is None else generator
    environment = AgentEnvironment(Prompts(TOKENIZER, True), run, lines)
    ends = {"stop_ids": (TOKENIZER.eos_id,), "longest": 900}
    return Collector(generator, environment, settings, **ends)


def collected(run, tasks=2, members=2, **values):
    """Return the trajectories of ``run``, in which a small model chose the actions."""
    collector = collector_of(run, **values)
    generator, environment = collector.generator, collector.environment
    for task in range(tasks):
        collector.start(task, task, members, seed=0)
    found = [t for group in collector.finish(range(tasks)) for t in group]
    for t in found:
        pairs = zip(t.tokens, t.logprobs, strict=True)
        acted = [pair for pair, acts in zip(pairs, t.is_action, strict=True) if acts]
        assert acted == generator.said.get(f"{t.group}/{t.member}", [])
    deadline = time.monotonic() + 5
    while environment.episodes and time.monotonic() < deadline:
        time.sleep(0.01)
    assert environment.episodes == {}
    return found


def ask(base_url, messages, **options):
    with OpenAI(base_url=base_url, api_key="-", max_retries=0) as client:
        return client.chat.completions.create(model="m", messages=messages, **options)


TEMPLATE = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}
{%- for call in m.tool_calls or () %}
{{- '<tool_call>\n' + call.function | tojson + '\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
