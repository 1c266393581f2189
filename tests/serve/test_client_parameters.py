"""Parameters that clients of OpenAI's protocol and of vLLM send beside a prompt.

The right values are those of ``transformers`` for the served checkpoint, and of the generator
without a server.
"""

import json
import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from starlette.testclient import TestClient
from transformers import AutoModelForCausalLM, AutoTokenizer

from moetrain.data.chat import CHATML
from moetrain.data.tokenizer import ByteTokenizer, load_tokenizer
from moetrain.generate.engine import Generator
from moetrain.generate.request import Request, SamplingParams, chat_ids, sampling_defaults
from moetrain.models.hf.load import load_hf
from moetrain.models.hf.save import save_hf
from moetrain.serve.server import CompletionServer
from tests.lib.generators import make_model

PROMPT = [ord(letter) for letter in "a prompt"]
SAMPLED = {"max_tokens": 6, "temperature": 0.8, "seed": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    template = "{{ reasoning_effort }}" + CHATML
    save_hf(make_model(), folder, tokenizer=ByteTokenizer().export(template))
    return folder


@pytest.fixture(scope="module")
def generator(folder):
    return Generator(load_hf(folder), load_tokenizer(str(folder)))


@pytest.fixture(scope="module")
def ask(generator):
    """Return ``ask(path, **body)``, which returns the reply's JSON."""
    with TestClient(CompletionServer(generator, "tiny").app) as http:
        yield lambda path="completions", **body: http.post(f"/v1/{path}", json=body).json()


def error_of(reply):
    return reply["error"]["message"]


@pytest.mark.parametrize(
    "neutral",
    [
        {"frequency_penalty": 0, "presence_penalty": 0.0, "repetition_penalty": 1.0},
        {"best_of": 1, "logit_bias": {}, "suffix": "", "min_tokens": 0, "top_k": -1},
        {"use_beam_search": False, "length_penalty": 1, "add_special_tokens": True},
        {"user": "u", "service_tier": "auto", "safety_identifier": "s", "prompt_cache_key": "k"},
        {"stop": None, "n": None, "top_p": None, "logit_bias": None, "stream": None, "min_p": None},
    ],
    ids=lambda body: next(iter(body)),
)
def test_parameters_that_change_nothing_change_nothing(ask, neutral):
    given = {"prompt": PROMPT, **SAMPLED}
    assert ask(**given, **neutral)["choices"] == ask(**given)["choices"]
    chat = {"messages": [{"role": "user", "content": "a"}], **SAMPLED}
    ours, theirs = (ask("chat/completions", **x)["choices"] for x in (chat, chat | neutral))
    assert ours == theirs


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"frequency_penalty": 0.5}, "'frequency_penalty' 0.5 is not supported"),
        ({"repetition_penalty": 1.1}, "leave it out, or send 1"),
        ({"logit_bias": {"5": 100}}, "leave it out, or send {}"),
        ({"best_of": 2}, "'best_of' 2 is not supported"),
        ({"suffix": "end"}, "leave it out, or send ''"),
        ({"top_k": -2}, "top_k"),
        ({"prompt": None}, "prompt"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_parameters_that_would_change_something_are_refused(ask, body, says):
    assert says in error_of(ask(**{"prompt": PROMPT, "max_tokens": 1} | body))


def test_tokens_that_end_a_completion(ask, folder):
    # The server's generator is not used, because its thread may still be at work.
    generator = Generator(load_hf(folder), load_tokenizer(str(folder)))

    def directly(**params):
        asked = SamplingParams(**SAMPLED | {"max_tokens": 40, **params})
        return generator.generate([Request("a", tuple(PROMPT), asked)])[0][0].tokens

    end = ByteTokenizer.eos_id
    given = {"prompt": PROMPT, **SAMPLED, "max_tokens": 40}
    whole = directly()
    third = whole[2]
    for body, stop_ids in (
        ({"stop_token_ids": [third]}, (third, end)),
        ({"stop_token_ids": [third], "ignore_eos": True}, (third,)),
        ({"ignore_eos": True}, ()),
    ):
        assert ask(**given, **body)["choices"][0]["token_ids"] == directly(stop_ids=stop_ids)
    assert "stop_token_ids" in error_of(ask(**given, stop_token_ids=[-1]))


def test_special_tokens_are_text_where_they_are_asked_for(ask, folder):
    theirs = AutoTokenizer.from_pretrained(folder)
    prompt, end = [72, 105, ByteTokenizer.eos_id, 33], "<|endoftext|>"
    given = {"prompt": prompt, "echo": True, "max_tokens": 0}
    for skips, expected in ((True, "Hi!"), (False, f"Hi{end}!")):
        assert theirs.decode(prompt, skip_special_tokens=skips) == expected
        assert ask(**given, skip_special_tokens=skips)["choices"][0]["text"] == expected


def joined(parts):
    """Return the choices of a stream, with their parts joined."""
    choices = {}
    for part in parts:
        (choice,) = part["choices"]
        one = choices.setdefault(choice["index"], {"text": "", "token_ids": [], "logprobs": {}})
        one["text"] += choice["text"]
        one["token_ids"] += choice["token_ids"]
        one["finish_reason"] = choice["finish_reason"]
        for key, values in choice["logprobs"].items():
            one["logprobs"][key] = [*one["logprobs"].get(key, []), *values]
    return [choices[i] for i in sorted(choices)]


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
@pytest.mark.parametrize("streams", [False, True])
def test_an_echo_has_the_prompts_log_probabilities(folder, ask, generator, max_tokens, streams):
    """lm-evaluation-harness asks so: ``echo`` with ``logprobs``."""
    given = {"prompt": [PROMPT, PROMPT[:3]], "temperature": 0, "logprobs": 2, "echo": True}
    given |= {"max_tokens": max_tokens, "ignore_eos": True}
    if streams:
        with TestClient(CompletionServer(generator, "tiny").app) as http:
            sent = http.post("/v1/completions", json=given | {"stream": True}).text
        parts = [json.loads(x.removeprefix("data: ")) for x in sent.split("\n\n")[:-2]]
        found, usage = joined(parts), parts[-1]["usage"]
    else:
        reply = ask(**given)
        found, usage = reply["choices"], reply["usage"]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for choice, prompt in zip(found, given["prompt"], strict=True):
        ids = prompt
        for _ in range(max_tokens):
            with torch.no_grad():  # over the tokenizer's tokens
                known = model(torch.tensor([ids])).logits[0, -1, : ByteTokenizer.vocab_size]
                ids = [*ids, int(known.argmax())]
        with torch.no_grad():
            logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        assert choice["token_ids"] == ids
        assert choice["text"] == ByteTokenizer().decode(ids)
        assert choice["finish_reason"] == "length"
        assert choice["logprobs"]["tokens"] == [ByteTokenizer().decode([i]) for i in ids]
        first, *rest = choice["logprobs"]["token_logprobs"]
        expected = [float(logprobs[i, token]) for i, token in enumerate(ids[1:])]
        assert (first, choice["logprobs"]["top_logprobs"][0]) == (None, None)
        assert rest == pytest.approx(expected, abs=1e-4)
        best = [max(top.values()) for top in choice["logprobs"]["top_logprobs"][1 : len(prompt)]]
        assert best == pytest.approx(logprobs[: len(prompt) - 1].amax(-1).tolist(), abs=1e-4)
        assert len(choice["logprobs"]["top_logprobs"]) == len(ids)
    read = sum(map(len, given["prompt"]))
    assert usage == {
        "prompt_tokens": read,
        "completion_tokens": 2 * max_tokens,
        "total_tokens": read + 2 * max_tokens,
    }


def test_an_echo_of_a_text_has_it_before_the_completion(ask):
    given = {"prompt": "a prompt", **SAMPLED, "n": 2}
    plain, echoed = ask(**given)["choices"], ask(**given, echo=True)["choices"]
    assert [choice["text"] for choice in echoed] == ["a prompt" + c["text"] for c in plain]
    assert "max_tokens 0 asks for nothing" in error_of(ask(prompt=PROMPT, max_tokens=0))


def test_effort_goes_to_the_template(ask):
    given = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    plain, more, most = (
        ask("chat/completions", **given, **body)["usage"]["prompt_tokens"]
        for body in (
            {},
            {"reasoning_effort": "high"},
            {"chat_template_kwargs": {"reasoning_effort": "highest"}},
        )
    )
    assert (more - plain, most - plain) == (len("high"), len("highest"))
    response = ask("responses", input="a", max_output_tokens=1, reasoning={"effort": "high"})
    assert response["usage"]["input_tokens"] == more


@pytest.mark.parametrize(
    ("config", "expected", "said"),
    [
        (None, {}, ""),
        ({"eos_token_id": 3, "do_sample": True}, {}, ""),
        (
            {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0, "repetition_penalty": 1.0},
            {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0},
            "",
        ),
        ({"top_k": None, "top_p": 7, "temperature": 0.5}, {"temperature": 0.5}, "top_p 7, which"),
        ({"repetition_penalty": 1.05}, {}, "repetition_penalty 1.05 is not used"),
    ],
)
def test_the_checkpoint_recommends_sampling(config, expected, said, caplog):
    model = SimpleNamespace(source=SimpleNamespace(generation=config))
    with caplog.at_level(logging.WARNING):
        assert sampling_defaults(model) == expected
    assert said in caplog.text
    assert bool(said) == bool(caplog.text)


def test_requests_without_parameters_have_the_checkpoints(folder):
    model = load_hf(folder)
    model.source = replace(model.source, generation={"top_k": 1, "temperature": 0.7})
    given = {"prompt": PROMPT, "max_tokens": 12, "seed": 5}
    with TestClient(
        CompletionServer(Generator(model, load_tokenizer(str(folder))), "t").app
    ) as http:
        post = lambda **body: http.post("/v1/completions", json=given | body).json()["choices"]  # noqa: E731
        greedy = post(temperature=0, top_k=0)
        assert post() == post(seed=6) == greedy
        assert post(top_k=0, temperature=1.5) != greedy


@pytest.mark.parametrize("content", ["An ans", "  An ans ", "a\n\n"])
@pytest.mark.parametrize("strips", [False, True])
def test_a_final_message_is_continued_as_transformers_does(folder, tmp_path, content, strips):
    template = CHATML.replace("message.content", "message.content | trim") if strips else CHATML
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_bytes((folder / file).read_bytes())
    (tmp_path / "chat_template.jinja").write_text(template)
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": content}]
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(str(tmp_path))
    for how in ({"continue_final_message": True}, {"add_generation_prompt": False}, {}):
        wanted = {"add_generation_prompt": not how, **how}
        expected = theirs.apply_chat_template(messages, tokenize=False, **wanted)
        assert bytes(chat_ids(ours, messages, **how)).decode() == expected


def test_a_chat_goes_on_with_its_last_message(ask):
    given = {"max_tokens": 2, "messages": [{"role": "user", "content": "q"}]}
    given["messages"].append({"role": "assistant", "content": "An ans"})
    reply = ask("chat/completions", **given, continue_final_message=True)
    plain = ask("chat/completions", **given, add_generation_prompt=False)
    more = plain["usage"]["prompt_tokens"] - reply["usage"]["prompt_tokens"]
    assert more == len("<|im_end|>\n")
    both = {"continue_final_message": True, "add_generation_prompt": True}
    assert "exclude each other" in error_of(ask("chat/completions", **given, **both))
    given["messages"].pop()
    wrong = error_of(ask("chat/completions", **given, continue_final_message=True))
    assert "the last message is not a text by the assistant" in wrong
