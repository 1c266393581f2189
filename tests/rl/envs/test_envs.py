"""Environments: their prompts, demonstrations and rewards; and calls of them, with any failure."""

import asyncio
import json
import pickle
import threading
import time
from functools import partial

import numpy as np
import pytest
import transformers

from moetrain.config import Config, ConfigError
from moetrain.data.chat import ChatTemplate
from moetrain.data.records import RecordReader
from moetrain.data.tokenizer import ByteTokenizer, load_tokenizer
from moetrain.rl.calls import Calls, Failed
from moetrain.rl.envs import Turn
from moetrain.rl.envs.shipped import GENERATED, load_function, open_environment
from moetrain.rl.setup import PromptWindow, Tasks
from tests.lib.tokenizer_files import save_letters
from tests.lib.toy_environments import CALCULATOR, YES_NO_MAYBE, evaluate

TOKENIZER = ByteTokenizer()


def settings(**values):
    words = [f"rl.{name}={value}" for name, value in values.items()]
    return Config.load("debug", words, environ={}).rl


def opened(name, **values):
    return open_environment(settings(env=name, **values), TOKENIZER)


def ids(text, ends=True):
    return [*text.encode(), *[TOKENIZER.eos_id] * ends]


@pytest.mark.parametrize("name", [*GENERATED, YES_NO_MAYBE, CALCULATOR])
def test_what_is_shown_is_what_the_environment_says_and_rewards(name):
    environment = opened(name)
    rewards = []
    for task in range(30):
        shown = environment.demonstrate(task)
        assert shown == environment.demonstrate(task)
        episode = environment.episode(task)
        turn, said = episode.reset(), []
        starts = np.flatnonzero(np.diff([0, *shown.mask]) == 1)
        stops = np.flatnonzero(np.diff([*shown.mask, 0]) == -1) + 1
        for start, stop in zip(starts, stops, strict=True):
            assert not turn.done
            said += [*turn.tokens, *shown.tokens[start:stop]]
            turn = episode.step(shown.tokens[start:stop])
        assert turn.done
        assert said == [*shown.tokens]
        rewards.append(turn.reward)
    expected = {0.5, 0.75, 1.0} if name == YES_NO_MAYBE else {1.0}
    assert set(rewards) == expected


@pytest.mark.parametrize(
    ("name", "task", "answers"),
    [
        (YES_NO_MAYBE, 3, {"yes": 0.5, "no": 0.75, "maybe": 1, "May be": 0, "": 0}),
        ("arithmetic", 0, {"7": 0, "": 0, "x": 0}),
        ("sort", 5, {"": 0, "x": 0}),
    ],
)
def test_rewards_of_other_answers(name, task, answers):
    environment = opened(name)
    for answer, reward in answers.items():
        episode = environment.episode(task)
        episode.reset()
        assert episode.step(ids(answer)) == Turn(reward=reward, done=True)


def test_sorting_is_rewarded_up_to_the_first_wrong_digit():
    environment = opened("sort", env_args='{"least": 4, "most": 4}')
    problem = environment.problem(2)
    right = problem.answer
    answers = [right, right + "9", right[:3], right[:2] + "x" + right[3], "x" + right[1:], ""]
    assert [environment.score(problem, a) for a in answers] == [1, 0.5, 0.375, 0.25, 0, 0]


@pytest.mark.parametrize("operations", ["+", "-", "*", "+-*"])
def test_arithmetic_answers_are_the_values_of_their_sums(operations):
    args = {"digits": 3, "terms": 6, "operations": operations}
    environment = opened("arithmetic", env_args=json.dumps(args))
    for task in range(40):
        problem = environment.problem(task)
        assert int(problem.answer) == eval(problem.facts) == evaluate(problem.facts)


@pytest.mark.parametrize("text", ["", "2**9", "1+", "x", "__import__('os')", "9" * 21, "1/2"])
def test_evaluate_refuses_text_that_is_no_sum(text):
    with pytest.raises(ValueError, match="no sum"):
        evaluate(text)


def test_the_calculator_answers_as_often_as_it_may():
    episode = opened(CALCULATOR, env_args='{"calls": 1}').episode(0)
    episode.reset()
    asked = episode.step(ids("calc 6*7"))
    assert (bytes(asked.tokens), asked.done) == (b"-> 42 ; ", False)
    last = episode.step(ids("calc 6*7"))
    assert (last.done, last.reward) == (True, 0)
    episode = opened(CALCULATOR).episode(0)
    episode.reset()
    assert bytes(episode.step(ids("calc 6/0")).tokens) == b"-> error ; "


# ---- jsonl, and what users bring ---------------------------------------------------------------


REWARDS = """
from __future__ import annotations
from dataclasses import dataclass

@dataclass
class Settings:  # dataclasses look for the module that they are in
    power: int = 1

def takes(line, answer):
    return line.pop("most")

async def later(line, answer):
    return len(answer) / line["most"]

def now(line, answer):
    return float(line["most"] == 4)

class Mine:
    num_tasks = 3
    def __init__(self, prompts, power=1):
        self.power = power
    def episode(self, task):
        raise NotImplementedError
"""


@pytest.fixture
def lines(tmp_path):
    (tmp_path / "rewards.py").write_text(REWARDS)
    path = tmp_path / "prompts.jsonl"
    chat = [{"role": "user", "content": "hi"}]
    rows = [{"prompt": "a?", "answer": 7, "most": 4}, {"messages": chat, "answer": "x", "most": 2}]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    return path


def test_prompts_from_a_file(lines):
    environment = opened("jsonl", prompts=lines, reward="exact")
    assert environment.num_tasks == 2
    episode = environment.episode(0)
    assert bytes(episode.reset().tokens) == b"a?"
    assert episode.step(ids(" 7\n")).reward == 1
    assert environment.episode(0).step(ids("8")).reward == 0
    chat = bytes(environment.episode(1).reset().tokens).decode()
    assert "user\nhi" in chat
    assert chat.endswith("assistant\n")


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": [{"from": "human", "value": "hi"}]},
        {"conversations": [{"role": "user", "content": "hi"}], "prompt": None, "messages": None},
        {"conversations": json.dumps([{"from": "human", "value": "hi"}])},
        {"conversations": [{"from": "system", "value": "S"}, {"from": "human", "value": "hi"}]},
        {"conversations": [{"from": "human", "value": "hi"}], "system": "S"},
    ],
    ids=str,
)
def test_conversations_are_prompts_as_training_reads_them(lines, row):
    """The prompt is the dialogue that training shows before the answer."""
    lines.write_text(json.dumps(row | {"answer": "x"}))
    environment = opened("jsonl", prompts=lines, reward="exact")
    shown = bytes(environment.episode(0).reset().tokens).decode()
    said = row["conversations"]
    said = json.loads(said) if isinstance(said, str) else said
    whole = row | {"conversations": [*said, {"from": "gpt", "value": "ANSWER"}]}
    reader = RecordReader(ChatTemplate.of(ByteTokenizer()))
    (document,) = reader.documents({k: v for k, v in whole.items() if v is not None})
    assert document.text.startswith(shown + "ANSWER")


def test_conversations_that_are_no_prompts_are_one_line(lines):
    turns = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]
    lines.write_text(json.dumps({"conversations": turns, "answer": "x"}))
    with pytest.raises(ConfigError, match="`conversations` ends with the assistant's turn"):
        opened("jsonl", prompts=lines, reward="exact")
    lines.write_text(json.dumps({"conversations": [*turns[:1], 3], "answer": "x"}))
    with pytest.raises(ConfigError, match=r"conversations\[1\] is not an object: 3; give"):
        opened("jsonl", prompts=lines, reward="exact")


@pytest.mark.parametrize(
    "turn",
    [
        {"role": "assistant", "content": None},
        {"role": "assistant"},
        {"from": "gpt", "value": None},
        {"role": "assistant", "content": None, "name": "a"},
    ],
    ids=str,
)
def test_a_last_turn_without_content_is_left_out_as_its_error_says(lines, turn):
    """ms-swift's sets have such a turn where the policy's answer stands."""
    asked = {"role": "user", "content": "15*3?"}
    lines.write_text(json.dumps({"messages": [asked, turn], "answer": "45"}))
    says = "`messages` ends with the assistant's turn; leave that turn out, or write what is"
    with pytest.raises(ConfigError, match=says):
        opened("jsonl", prompts=lines, reward="exact")
    lines.write_text(json.dumps({"messages": [asked], "answer": "45"}))
    assert opened("jsonl", prompts=lines, reward="exact").num_tasks == 1


def test_a_record_without_a_prompt_says_which_field_may_be_it(lines):
    lines.write_text(json.dumps({"question": "a?", "answer": "7"}))
    with pytest.raises(ConfigError, match=r"no `messages`; rename `question` to `prompt`$"):
        opened("jsonl", prompts=lines, reward="exact")
    lines.write_text(json.dumps({"instruction": "add", "input": "3, 4", "answer": "7"}))
    says = "; rename `instruction` to `prompt`, with all that the question needs$"
    with pytest.raises(ConfigError, match=says):
        opened("jsonl", prompts=lines, reward="exact")


ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("row", "says"),
    [
        # CodeContests, LiveCodeBench, knights-and-knaves
        (
            {"name": "1_A", "description": "Add two numbers"},
            "; perhaps rename `description` to `pr",
        ),
        (
            {"question_title": "A", "question_content": "Three cards", "platform": "a long one"},
            "; perhaps rename `question_content` to `prompt`$",
        ),
        (
            {
                "quiz": "Who is a knave?",
                "names": ["Ann"],
                "solution_text": "Ann is a knave, Bo not",
            },
            "; perhaps rename `quiz` to `prompt`$",
        ),
        # Countdown, a pair, Open-Reasoner-Zero
        ({"chosen": "Human: q Assistant: a"}, "; write what the policy is asked as `prompt`$"),
        ({"nums": [1, 2], "target": 3}, "; write what the policy is asked as `prompt`$"),
        ([{"from": "human", "value": "q"}], "; it is a list of turns: .* `messages` of an object"),
        # MMLU-Pro, APPS, KodCode, NeMo Gym
        ({"question": "Prime?", "options": ["4", "7"]}, "to `prompt`, with `options` in it$"),
        (
            {"question": "Add", "starter_code": "class Solution:\n    def add(self): pass\n"},
            "to `prompt`, with `starter_code` in it$",
        ),
        (
            {"question": "Add", "test_info": [{"function_declaration": "def add(a, b):"}]},
            r"to `prompt`, with `test_info\.function_declaration` in it$",
        ),
        (
            {"params": {"input": [{"role": "user", "content": "1+1?"}], "tools": [ADD]}},
            r"; write `params\.input` as `messages` and `params\.tools` as `tools`$",
        ),
        ({"question": "1+1?", "extra": json.dumps([ADD])}, "to `prompt` and `extra` as `tools`$"),
    ],
    ids=str,
)
def test_a_record_without_a_prompt_says_what_belongs_to_it(lines, row, says):
    lines.write_text(json.dumps(row))
    with pytest.raises(ConfigError, match=says):
        opened("jsonl", prompts=lines, reward="zero")


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"options": ["4", "7"]}, "`options`, which may be a part of the question (line 1: '4')"),
        ({"options": '["4", "7"]'}, "`options`, which may be a part of the question (line 1: '4')"),
        ({"A": "4", "B": "7"}, "`A`, which may be a part of the question (line 1: '4')"),
        ({"context": "Ann won."}, "`context`, which may be a part of the question (line 1: 'Ann"),
        (
            {"starter_code": "class Solution:\n    def prime(self): pass\n"},
            "`starter_code`, with a name that tests of the answer may call",
        ),
        (
            {"input_output": json.dumps({"fn_name": "prime", "inputs": [4]})},
            "`input_output.fn_name`, with a name that tests of the answer may call (line 1: 'pri",
        ),
        ({"params": {"tools": [ADD]}}, "`params.tools`, which holds tools (line 1: 'add'); write "),
    ],
    ids=str,
)
def test_what_a_policy_may_need_and_is_not_shown_is_said(lines, caplog, row, says):
    """MMLU-Pro's options, APPS's code and names, and NeMo Gym's tools."""
    row = {"prompt": "Which one?", "answer": "7", **row}
    lines.write_text(json.dumps({"prompt": "1+1?", "answer": "2"}) + "\n" + json.dumps(row))
    opened("jsonl", prompts=lines, reward="exact")
    says = says.replace("line 1", "line 2")
    assert f"of the first 2 prompts 1 do not show {says}" in caplog.text


@pytest.mark.parametrize(
    "row",
    [
        {"options": ["4", "7"], "context": ""},
        {"starter_code": "def prime(x):", "entry_point": "prime", "question_id": "a"},
        {"starter_code": "", "input_output": json.dumps({"inputs": ["4"], "outputs": ["no"]})},
        {"context_messages": [{"role": "user", "content": "Be brief. prime(x): is it 4 or 7?"}]},
        {"solution": "def other(x): pass", "tests": "assert other(7)", "class_name": "math"},
        {"ground_truth": json.dumps({"func_name": "validate_no_commas", "N": None})},
        {"ground_truth": [{"name": "add", "parameters": {"a": 1}}], "problem": "Is it 4 or 7?"},
        {"question": "function (see there) of 4 or 7", "tools": [ADD], "function_name": "add"},
    ],
    ids=str,
)
@pytest.mark.parametrize("is_chat", [False, True])
def test_what_a_policy_is_shown_or_only_the_reward_needs_is_not_said(lines, caplog, row, is_chat):
    asked = "prime(x): is it 4 or 7?"
    asked = [{"role": "user", "content": asked}] if is_chat or "tools" in row else asked
    lines.write_text(json.dumps({"prompt": asked, "answer": "7", **row}))
    opened("jsonl", prompts=lines, reward="exact")
    assert not caplog.text


@pytest.fixture
def tested(tmp_path):
    """A reward of a user's, as one that runs tests is."""
    (tmp_path / "tested.py").write_text("def score(line, answer):\n    return 0.0\n")
    return f"{tmp_path / 'tested.py'}:score"


@pytest.mark.parametrize(
    ("row", "name"),
    [
        ({"answer": ["assert add(1, 2) == 3", "assert add(0, 0) == 0"]}, "add"),  # MBPP
        ({"answer": "assert set(add([1])) == set([1])"}, "add"),
        ({"answer": '["assert add(1, 2) == 3"]'}, "add"),
        ({"challenge_test_list": ["assert add(2, 2) == 4"], "answer": ["assert add(1)"]}, "add"),
        ({"answer": "x", "test_list": ["assert add(1, 2) == 3"]}, "add"),
        ({"answer": "from solution import add\n\ndef test_add():\n    assert add(1) == 1"}, "add"),
        ({"answer": "assert Solution().add(1, 2) == 3"}, "Solution"),
        (
            {"test_setup_code": "root = Node(1)", "answer": ["assert height(root) == 1"]},
            "height",
        ),
        (
            {
                "answer": "import unittest\n\nclass Sums(unittest.TestCase):\n"
                "    def test_add(self):\n        self.assertEqual(add(1, 2), 3)\n"
            },
            "add",
        ),
    ],
)
def test_a_function_that_tests_call_and_no_prompt_names_is_said(lines, caplog, tested, row, name):
    field = "test_list" if "test_list" in row else "answer"
    shown = {"prompt": f"Write {name}.", **row}
    hidden = {"prompt": "Write a function for numbers: additional.", **row}
    lines.write_text(json.dumps(shown) + "\n" + json.dumps(hidden))
    opened("jsonl", prompts=lines, reward=tested)
    says = f"of the first 2 prompts 1 do not show the function that the tests in `{field}` call"
    assert f"{says} (line 2: '{name}'); write the name in the prompt" in caplog.text
    assert caplog.text.count("that the tests in") == 1


@pytest.mark.parametrize(
    "row",
    [
        {"answer": "def check(candidate):\n    assert candidate(1, 2) == 3\n"},
        {"answer": "def close(x): return x\nassert close(3) == 3"},
        {"answer": "import math\nfrom os import path as p\nassert math.isclose(len(p(1)), 1)"},
        {"answer": "Node(3) is the answer (see above)"},
        {"answer": "f(3)"},
        {"answer": 7, "tests": [{"input": "3\n", "output": "6\n"}]},
        {"answer": "7", "test_setup_code": "root = Node(1)"},
        {"answer": ["assert add(1, 2) == 3"], "messages": [{"role": "user", "content": "add!"}]},
    ],
    ids=str,
)
def test_names_that_tests_have_themselves_are_not_said(lines, caplog, tested, row):
    lines.write_text(json.dumps({**({} if "messages" in row else {"prompt": "Write it."}), **row}))
    opened("jsonl", prompts=lines, reward=tested)
    assert "that the tests" not in caplog.text
    assert "do not show" not in caplog.text


def test_tools_of_a_conversation_are_in_its_prompt(lines):
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = "{{ tools | tojson }}{{ messages[0].content }}"
    row = {"messages": [{"role": "user", "content": "hi"}], "tools": [{"a": 1}], "answer": 1}
    lines.write_text(json.dumps(row))
    environment = open_environment(settings(env="jsonl", prompts=lines, reward="exact"), tokenizer)
    assert bytes(environment.episode(0).reset().tokens) == b'[{"a": 1}]hi'
    lines.write_text(json.dumps(row | {"tools": ["a"]}))
    with pytest.raises(
        ConfigError, match=r"rl\.prompts: .*:1: tools\[0\] is text that is not JSON"
    ):
        opened("jsonl", prompts=lines, reward="exact")


def test_turns_as_text_are_turns(lines):
    """Tables have the JSON of a conversation as text, which training reads as the conversation."""
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = RENDERS_ALL
    environment = partial(open_environment, tokenizer=tokenizer)
    values = {"env": "jsonl", "prompts": lines, "reward": "exact"}
    shown = []
    for prompt in (turns, json.dumps(turns), turns[1:], json.dumps(turns[1])):
        lines.write_text(json.dumps({"prompt": prompt, "answer": "a", "tools": VARIABLES["tools"]}))
        shown.append(bytes(environment(settings(**values)).episode(0).reset().tokens))
    assert shown[0] == shown[1]
    assert b"|system:s|user:q|assistant:" in shown[0]
    assert shown[2] == shown[3]
    assert b"|user:q|assistant:" in shown[2]
    lines.write_text(json.dumps({"prompt": "what is [1, 2]?", "answer": "a"}))
    assert bytes(environment(settings(**values)).episode(0).reset().tokens) == b"what is [1, 2]?"
    lines.write_text(json.dumps({"prompt": str(turns), "answer": "a"}))
    with pytest.raises(ConfigError, match=r"rl\.prompts: .*:1: `prompt` is text that is not JSON"):
        environment(settings(**values))


VARIABLES = {
    "tools": [{"type": "function", "function": {"name": "add"}}],
    "documents": [{"title": "a", "text": "b"}],
    "chat_template_kwargs": {"enable_thinking": False},
}
RENDERS_ALL = (
    "{{ tools | tojson }}{{ documents | tojson }}{{ enable_thinking }}|"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}|{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.mark.parametrize("prompt", ["hi", [{"role": "user", "content": "hi"}]])
def test_a_prompts_tools_and_variables_are_in_its_chat_as_transformers_renders_it(
    prompt, lines, tmp_path
):
    folder = save_letters(tmp_path / "model", {"chat_template": RENDERS_ALL})
    lines.write_text(json.dumps({"prompt": prompt, "answer": 1, **VARIABLES}))
    given = settings(env="jsonl", prompts=lines, reward="exact", chat="yes")
    environment = open_environment(given, load_tokenizer(str(folder)))
    variables = {k: VARIABLES[k] for k in ("tools", "documents")}
    theirs = transformers.AutoTokenizer.from_pretrained(folder).apply_chat_template(
        [{"role": "user", "content": "hi"}],
        add_generation_prompt=True,
        return_dict=False,
        **variables,
        **VARIABLES["chat_template_kwargs"],
    )
    assert [*environment.episode(0).reset().tokens] == theirs


@pytest.mark.parametrize("name", VARIABLES)
def test_variables_beside_a_prompt_that_is_no_chat_are_refused(name, lines):
    lines.write_text(json.dumps({"prompt": "hi", "answer": 1, name: VARIABLES[name]}))
    with pytest.raises(ConfigError, match=f"line 1: `{name}` would be lost, .* rl.chat yes"):
        opened("jsonl", prompts=lines, reward="exact")
    row = {"prompt": "hi", "answer": 1, **dict.fromkeys(VARIABLES), "tools": []}
    lines.write_text(json.dumps(row))  # null, as in tables
    assert bytes(opened("jsonl", prompts=lines, reward="exact").episode(0).reset().tokens) == b"hi"


def test_rewards_of_a_user(lines):
    file = lines.with_name("rewards.py")
    environment = opened("jsonl", prompts=lines, reward=f"{file}:now")
    assert [environment.episode(i).step(ids("")).reward for i in (0, 1)] == [1, 0]
    environment = opened("jsonl", prompts=lines, reward=f"{file}:later")
    assert asyncio.run(environment.episode(0).step(ids("abc"))) == Turn(reward=0.75, done=True)
    environment = opened("jsonl", prompts=lines, reward=f"{file}:takes")
    scores = [environment.episode(0).step(ids("")).reward for _ in range(2)]
    assert scores == [4, 4]  # a call cannot change the line for the next one
    own = opened(f"{file}:Mine", env_args='{"power": 3}')
    assert (own.num_tasks, own.power) == (3, 3)


@pytest.mark.parametrize("name", ["plain", "no-identifier 2", "with.dots", "für"])
def test_classes_of_a_users_file_can_be_pickled(name, tmp_path):
    file = tmp_path / f"{name}.py"
    file.write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "@dataclass\n"
        "class Score:\n"
        "    value: float = 0.5\n"
    )
    made = load_function(f"{file}:Score", "rl.reward", "shipped")()
    assert pickle.loads(pickle.dumps(made)) == made


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"env": "sorting"}, "rl.env: 'sorting' is neither sort"),
        ({"env": "sort", "env_args": '{"most": }'}, "rl.env_args: .* is not JSON"),
        ({"env": "sort", "env_args": "[3]"}, "rl.env_args: .* is not a JSON object"),
        ({"env": "sort", "env_args": '{"mots": 3}'}, "rl.env_args: .*mots"),
        ({"env": "jsonl"}, "rl.prompts: not set"),
        ({"env": "jsonl", "prompts": "P"}, "rl.reward: not set"),
        (
            {"env": "jsonl", "prompts": "nowhere", "reward": "exact"},
            "rl.prompts: .* cannot be read",
        ),
        ({"env": "jsonl", "prompts": "P", "reward": "F:none"}, "rl.reward: cannot load .*none"),
        ({"env": "jsonl", "prompts": "P", "reward": "good"}, "rl.reward: 'good' is neither exact"),
        ({"env": "jsonl", "prompts": "F", "reward": "exact"}, "rl.prompts: .*:2: not JSON"),
        ({"env": "sort", "env_args": '{"most": 11}'}, "rl.env_args: least 4, most 11: "),
        (
            {"env": "sort", "env_args": '{"most": "9"}'},
            "rl.env_args: most '9' is not a whole number",
        ),
        (
            {"env": "sort", "env_args": '{"least": 4.5}'},
            "rl.env_args: least 4.5 is not a whole number",
        ),
        ({"env": "arithmetic", "env_args": '{"terms": 201}'}, "rl.env_args: terms 201: give 1 to"),
        (
            {"env": "arithmetic", "env_args": '{"terms": 2.5}'},
            "rl.env_args: terms 2.5 is not a whole",
        ),
        (
            {"env": CALCULATOR, "env_args": '{"calls": "x"}'},
            "rl.env_args: calls 'x' is not a whole",
        ),
        ({"env": "arithmetic", "env_args": '{"digits": 0}'}, "rl.env_args: digits 0: "),
        ({"env": "arithmetic", "env_args": '{"operations": "/"}'}, "rl.env_args: operations '/'"),
        ({"env": CALCULATOR, "env_args": '{"terms": 0}'}, "rl.env_args: terms 0: "),
        ({"env": "E:x"}, "rl.env: cannot load .*: SystemExit"),
    ],
)
def test_wrong_settings_are_one_line(values, message, lines):
    exits = lines.with_name("exits.py")
    exits.write_text("raise SystemExit(2)")
    names = {"P": str(lines), "F": str(lines.with_name("rewards.py")), "E": str(exits)}
    starts = {f"{name}:": f"{names[name]}:" for name in "FE"}
    values = {k: names.get(v, v) for k, v in values.items()}
    values = {k: starts.get(v[:2], v[:2]) + v[2:] for k, v in values.items()}
    with pytest.raises(ConfigError, match=message):
        opened(values.pop("env"), **values)


def test_a_line_ends_where_json_says(lines):
    """Lines end only at newlines, not at Unicode's other line ends, which JSON allows in a text."""
    row = {"prompt": "a\u2028b\x85c", "answer": 1}
    lines.write_text(json.dumps(row, ensure_ascii=False) + "\r\n" + json.dumps(row), "utf-8")
    environment = opened("jsonl", prompts=lines, reward="exact")
    assert environment.lines == [row, row]


def test_a_line_without_answer(lines):
    lines.write_text('{"prompt": "a", "answer": 1}\n{"prompt": "b"}\n')
    with pytest.raises(ConfigError, match="line 2: no answer, which exact needs"):
        opened("jsonl", prompts=lines, reward="exact")
    assert opened("jsonl", prompts=lines, reward="zero").num_tasks == 2


def test_a_line_of_what_was_a_table(lines):
    """Absent columns of a table are null."""
    said = [{"role": "user", "content": "a"}]
    rows = [{"prompt": None, "messages": said, "answer": "b"}, {"prompt": "a", "messages": None}]
    rows[1]["answer"] = "b"
    lines.write_text("\n".join(map(json.dumps, rows)))
    environment = opened("jsonl", prompts=lines, reward="exact")
    assert [environment.problem(task).prompt for task in range(2)] == [said, "a"]
    rows[1]["answer"] = None
    lines.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(ConfigError, match=r"line 2: no answer, which exact needs"):
        opened("jsonl", prompts=lines, reward="exact")


@pytest.mark.parametrize(
    "values",
    [{"env": "reasoning-gym:chain_sum"}, {"env": "jsonl", "prompts": "P", "reward": "math"}],
)
def test_extras_that_are_not_installed_are_one_line(values, lines, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    values = {k: v.replace("P", str(lines)) for k, v in values.items()}
    with pytest.raises(ConfigError, match=r"not installed; pip install 'moetrain\[rl\]'"):
        opened(values.pop("env"), **values)


def test_reasoning_gym():
    pytest.importorskip("reasoning_gym")
    environment = opened("reasoning-gym:chain_sum", env_args='{"seed": 5, "max_terms": 3}')
    shown = environment.demonstrate(11)
    episode = environment.episode(11)
    turn = episode.reset()
    assert shown.tokens[: len(turn.tokens)] == turn.tokens
    assert episode.step(shown.tokens[len(turn.tokens) :]).reward == 1
    assert episode.step(ids("no number")).reward < 1
    with pytest.raises(ConfigError, match=r"rl.env: reasoning-gym:nothing: "):
        opened("reasoning-gym:nothing")
    with pytest.raises(ConfigError, match=r"rl.env: reasoning-gym:chain_sum: .*max_terms"):
        opened("reasoning-gym:chain_sum", env_args='{"max_terms": -3}')


ASKED = {"role": "user", "content": "2+2?"}


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (
            {"problem": "2+2?", "messages": [ASKED, {"role": "assistant", "content": "It is 4."}]},
            r"line 1: `messages` ends with the assistant's turn, which the policy would be shown: "
            r"'It is 4\.'; leave that turn out, or write what is asked as `prompt`",
        ),
        (
            {"prompt": [ASKED, {"role": "assistant", "content": "It is 4."}]},
            r"line 1: `prompt` ends with the assistant's turn",
        ),
        (
            {"prompt": "2+2?", "answer": None, "reward_model": {"ground_truth": "4"}},
            r"no answer, which exact needs; give it as `answer` \(perhaps from "
            r"`reward_model\.ground_truth`\)",
        ),
        (  # SYNTHETIC-2
            {"prompt": "2+2?", "answer": None, "verification_info": '{"ground_truth": "4"}'},
            r"perhaps from `verification_info\.ground_truth`, out of its JSON\)",
        ),
        (  # Skywork-OR1
            {"prompt": "2+2?", "answer": None, "reward_model": {"ground_truth": '["4"]'}},
            r"perhaps from one value of `reward_model\.ground_truth`, out of its JSON\)",
        ),
        (  # OlympiadBench, and AIME's columns
            {"prompt": "2+2?", "answer": None, "solution": ["Count. 4"], "final_answer": ["$4$"]},
            r"perhaps from one value of `final_answer`\)",
        ),
        ({"prompt": "2+2?", "answer": None, "Answer": 4}, r"perhaps from `Answer`\)"),
        (
            {"prompt": "2+2?", "answer": {"ground_truth": "4", "style": "rule"}},
            r"`answer` is an object, which exact cannot compare: .*; write its `ground_truth` ",
        ),
        (
            {"prompt": "2+2?", "answer": ["4", "four"]},
            r"`answer` is a list, which exact cannot compare: .*; write one value there",
        ),
        ({"text": "2+2?"}, r"; rename `text` to `prompt`$"),
        ({"input": [ASKED]}, r"; write `input` as `messages`$"),
        (
            {"responses_create_params": {"input": [ASKED]}},
            r"; write `responses_create_params\.input` as `messages`$",
        ),
    ],
)
def test_prompts_that_would_be_learned_wrongly_are_one_line(lines, row, says):
    lines.write_text(json.dumps({"answer": "4", **row}) + "\n")
    with pytest.raises(ConfigError, match=says):
        opened("jsonl", prompts=lines, reward="exact")


GPQA = {
    "Question": "How many carbons has it?",
    "Correct Answer": "11",
    **{f"Incorrect Answer {i}": str(12 + i) for i in (1, 2, 3)},
    "Explanation": "Count.",
}


@pytest.mark.parametrize("reward", ["exact", "math"])
def test_columns_of_options_are_named(lines, caplog, reward):
    """GPQA's table has the right option and the wrong ones in columns of their own."""
    if reward == "math":
        pytest.importorskip("math_verify")
    wrong = "`Incorrect Answer 1`, `Incorrect Answer 2` and `Incorrect Answer 3`"
    lines.write_text(json.dumps(GPQA))
    says = "rename `Question` to `prompt`, with the options `Correct Answer`, "
    says += f"{wrong} behind it, shuffled and lettered, and the right one's letter as `answer`$"
    with pytest.raises(ConfigError, match=says):
        opened("jsonl", prompts=lines, reward=reward)
    row = {**GPQA, "prompt": GPQA["Question"]}
    lines.write_text(json.dumps(row))
    says = r"give it as `answer` \(perhaps the letter of `Correct Answer`, if the prompt has all "
    says += "options, `Correct Answer` and the wrong ones such as `Incorrect Answer 1`, shuffled"
    with pytest.raises(ConfigError, match=says):
        opened("jsonl", prompts=lines, reward=reward)
    lines.write_text(json.dumps({**row, "answer": "11"}))
    opened("jsonl", prompts=lines, reward=reward)
    assert f"prompts 1 do not show {wrong}, which may be wrong options of the" in caplog.text
    caplog.clear()
    prompt = f"{GPQA['Question']} A) 13, B) 11, C) 14, D) 15"
    lines.write_text(json.dumps({**row, "prompt": prompt, "answer": "B"}))
    opened("jsonl", prompts=lines, reward=reward)
    assert "options" not in caplog.text


def test_wrong_options_of_other_sets_are_found(lines):
    """SciQ's columns. ``Incorrect`` alone, or beside other words, names no option."""
    row = {"question": "Why is it?", "correct_answer": "a", "distractor1": "b", "distractor2": "c"}
    lines.write_text(json.dumps(row))
    with pytest.raises(ConfigError, match="options `correct_answer`, `distractor1` and `distract"):
        opened("jsonl", prompts=lines, reward="exact")
    row = {"question": "Why is it?", "Extra Incorrect Answer 1": "b", "wrong_count": "c"}
    lines.write_text(json.dumps(row))
    with pytest.raises(ConfigError, match=r"rename `question` to `prompt`$"):
        opened("jsonl", prompts=lines, reward="exact")


WORKED = "Two and two are four. One more makes 5. But one of them is lost, so 4 are left."


@pytest.mark.parametrize("reward", ["exact", "math"])
def test_a_worked_text_is_not_the_first_choice_of_an_answer(lines, caplog, reward):
    """SYNTHETIC-1's ``gold_standard_solution`` is a whole solution."""
    if reward == "math":
        pytest.importorskip("math_verify")
    row = {"prompt": "How many?", "gold_standard_solution": WORKED}
    for also in ({"verification_info": '{"ground_truth": "4"}'}, {"final_answer": "4"}):
        lines.write_text(json.dumps({**row, **also}))
        with pytest.raises(
            ConfigError, match=r"perhaps from `(verif\w+\.ground_truth|final_answer)`"
        ):
            opened("jsonl", prompts=lines, reward=reward)
    lines.write_text(json.dumps({"prompt": "How many?", "answer": WORKED}))
    opened("jsonl", prompts=lines, reward=reward)
    assert "of the first 1 answers 1 are texts of several sentences without a mark" in caplog.text
    for text in (
        "4",
        "x = 4. y = 3.",
        f"{WORKED}\n#### 4",
        rf"{WORKED} So \boxed{{4}}",
        "At 9 a.m.",
    ):
        caplog.clear()
        lines.write_text(json.dumps({"prompt": "How many?", "answer": text}))
        opened("jsonl", prompts=lines, reward=reward)
        assert "several sentences" not in caplog.text, text


CHECKED = [
    ({"func_name": "verify_sentences", "N": 3}, "what a function that checks the answer is given"),
    ({"inputs": ["1 2\n"], "outputs": ["3\n"]}, "tests of a program"),  # Eurus
    ({"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}, "tests of a program"),  # APPS
    ([{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}], "tests of a program"),
]


@pytest.mark.parametrize(("value", "said"), CHECKED)
@pytest.mark.parametrize("reward", ["exact", "math"])
def test_what_a_checker_needs_is_no_answer(lines, caplog, value, said, reward):
    """RLVR-IFeval's ``ground_truth`` is what a function that checks the answer is called with."""
    if reward == "math":
        pytest.importorskip("math_verify")
    for truth in (value, json.dumps(value)):
        lines.write_text(json.dumps({"prompt": "Do it.", "ground_truth": truth}))
        says = f"no answer, .* and `ground_truth` is {said}.*; set another rl.reward: a function"
        with pytest.raises(ConfigError, match=says) as error:
            opened("jsonl", prompts=lines, reward=reward)
        assert "perhaps" not in str(error.value)
    lines.write_text(json.dumps({"prompt": "Do it.", "answer": value}))
    with pytest.raises(ConfigError, match=f"`answer` is {said}.*; set another rl.reward"):
        opened("jsonl", prompts=lines, reward=reward)
    lines.write_text(json.dumps({"prompt": "Do it.", "answer": json.dumps(value)}))
    opened("jsonl", prompts=lines, reward=reward)
    assert f"this is {said}" in caplog.text
    assert "out of the JSON" not in caplog.text


KNIGHTS = {  # K-and-K/knights-and-knaves, with the fields of its card
    "prompt": "Zoey remarked, 'Riley is a knave'. So who is a knight and who is a knave?",
    "names": ["Zoey", "Riley"],
    "solution": [False, True],
    "solution_text": "Zoey is a knave, and Riley is a knight.",
    "solution_text_format": "(1) Zoey is a knave\n(2) Riley is a knight",
    "cot_foot": "This leads to a feasible solution.",
}
ALONE = {"prompt": "Which of 1 and 2 are prime?", "solution": [False, True]}
ROOTS = {"prompt": "Solve x^2 = 3x.", "answer": [0, 3], "solution": "x (x - 3) = 0, so 0 or 3."}


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (
            KNIGHTS,
            r"; give it as `answer` \(perhaps from `solution_text`\), or another rl.reward: a ",
        ),
        (
            {"answer": [False, True], **KNIGHTS},
            r"a list, .* True\]; write all values as one text, perhaps `solution_text`, there, or ",
        ),
        (
            ALONE,
            r"\(perhaps from all values of `solution` as one text, of the form that the prompt as",
        ),
        (
            ROOTS,
            r"a list, which exact cannot compare: \[0, 3\]; write all values as one text there,",
        ),
    ],
    ids=["Knights-and-Knaves", "with an answer", "without a text", "roots"],
)
def test_several_values_that_are_one_answer_are_not_offered_alone(lines, row, says):
    """A policy that wrote one person's truth value, and nothing else, earned 1."""
    lines.write_text(json.dumps(row))
    with pytest.raises(ConfigError, match=says) as error:
        opened("jsonl", prompts=lines, reward="exact")
    assert "one value" not in str(error.value)
    lines.write_text(json.dumps({**row, "answer": row.get("solution_text", "0, 3")}))
    opened("jsonl", prompts=lines, reward="exact")


@pytest.mark.parametrize("answer", ["3 + 4 = 7\n#### 7", r"So it is $\boxed{7}$."])
def test_a_solution_that_exact_compares_is_said(lines, caplog, answer):
    lines.write_text(
        "".join(json.dumps({"prompt": "?", "answer": x}) + "\n" for x in ("7", answer))
    )
    opened("jsonl", prompts=lines, reward="exact")
    assert "of the first 2 answers 1 have a whole solution" in caplog.text
    assert "(line 2: " in caplog.text
    assert "set rl.reward math" in caplog.text


@pytest.mark.parametrize("answer", ['{"ground_truth": "4"}', '["4"]'])
@pytest.mark.parametrize("reward", ["exact", "math"])
def test_an_answer_in_json_is_said(lines, caplog, answer, reward):
    if reward == "math":
        pytest.importorskip("math_verify")
    lines.write_text(json.dumps({"prompt": "2+2?", "answer": answer}))
    opened("jsonl", prompts=lines, reward=reward)
    assert "of the first 1 answers 1 have " in caplog.text
    assert "; write the value out of the JSON" in caplog.text


@pytest.mark.parametrize("answer", ["(0, 1]", r"[0, \infty)", "[1, 2]", "{1, 2}", "[0,1]"])
def test_an_interval_or_a_set_is_a_value(lines, caplog, answer):
    pytest.importorskip("math_verify")
    lines.write_text(json.dumps({"prompt": "?", "answer": answer}))
    opened("jsonl", prompts=lines, reward="math")
    assert "JSON" not in caplog.text


def test_answers_without_a_value_are_said(lines, caplog):
    pytest.importorskip("math_verify")
    answers = ["7", "proof", '{"func_name": null}', r"\frac{1}{2}"]
    lines.write_text("".join(json.dumps({"prompt": "?", "answer": x}) + "\n" for x in answers))
    opened("jsonl", prompts=lines, reward="math")
    assert "of the first 4 answers 2 have no value that rl.reward math finds (line 2" in caplog.text


COUNTDOWN = [  # Jiayi-Pan/Countdown-Tasks-3to4, with a prompt in words
    {"target": 98, "nums": [44, 19, 35], "prompt": "Using the numbers [44, 19, 35], make 98."},
    {"target": 64, "nums": [63, 95, 96], "prompt": "Using the numbers [63, 95, 96], make 64."},
]


@pytest.mark.parametrize("reward", ["exact", "math"])
def test_a_number_that_each_prompt_shows_is_not_offered_as_its_answer(lines, caplog, reward):
    """Countdown's ``target`` is what the numbers shall make, and an expression the answer."""
    if reward == "math":
        pytest.importorskip("math_verify")
    lines.write_text("".join(json.dumps(line) + "\n" for line in COUNTDOWN))
    says = r"line 1: no answer, .* and `target` is no right answer: .*; set another rl.reward"
    with pytest.raises(ConfigError, match=says) as error:
        opened("jsonl", prompts=lines, reward=reward)
    assert "perhaps" not in str(error.value)
    named = [{**line, "answer": line["target"]} for line in COUNTDOWN]
    lines.write_text("".join(json.dumps(line) + "\n" for line in named))
    opened("jsonl", prompts=lines, reward=reward)
    assert "each of the first 2 prompts shows its `answer` (line 1: 98)" in caplog.text


def test_a_prompt_that_cannot_be_read_is_named_beside_an_answer_that_is_missing(lines):
    """The first line has no answer, and the second one a turn that is no object."""
    rows = [COUNTDOWN[0], {**COUNTDOWN[1], "prompt": [3]}]
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ConfigError, match="line 1: no answer"):
        opened("jsonl", prompts=lines, reward="exact")


def test_a_number_that_one_prompt_shows_by_chance_is_offered(lines, caplog):
    """The second answer, 41, is no number of its prompt, though 410 and 4.1 are."""
    asked = [("5 apples, and 0 more: how many?", 5), ("Round 40.6, not 410 or 4.1.", 41)]
    rows = [{"prompt": prompt, "target": target} for prompt, target in asked]
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ConfigError, match="perhaps from `target`"):
        opened("jsonl", prompts=lines, reward="exact")
    rows = [{"prompt": prompt, "answer": target} for prompt, target in asked]
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    opened("jsonl", prompts=lines, reward="exact")
    assert "shows its `answer`" not in caplog.text


MMLU = {"prompt": "Capital of France?\n%s", "choices": ["Rome", "Paris", "Oslo", "Bern"]}
WINOGRANDE = {
    "prompt": "Ian ate Dennis's menudo, as _ despised it.",
    "option1": "Ian",
    "option2": "Dennis",
}


@pytest.mark.parametrize("reward", ["exact", "math"])
@pytest.mark.parametrize(
    ("answers", "says"),
    [
        ([1, 0], "2 may be an index from 0 into"),  # MMLU's card: 0 is A
        (["3", "0"], "2 may be an index from 0 into"),
        ([3], "1 may be an index (from 0 or from 1, its values do not show) into"),
        ([4], "1 may be an index from 1 into"),
        (["B", "C"], "2 may be a letter or a name for"),
        ([-1], None),
        ([5], None),
        ([True], None),
        (["Paris"], None),
        (["so B"], None),
    ],
    ids=str,
)
@pytest.mark.parametrize("write", [list, json.dumps, str])
def test_an_answer_that_may_point_at_an_option_is_said(lines, caplog, answers, says, write, reward):
    """Exports as CSV have lists as the text of JSON or of Python."""
    if reward == "math":
        pytest.importorskip("math_verify")
    row = {
        **MMLU,
        "prompt": MMLU["prompt"] % "Rome\nParis\nOslo\nBern",
        "choices": write(MMLU["choices"]),
    }
    lines.write_text("".join(json.dumps({**row, "answer": x}) + "\n" for x in answers))
    opened("jsonl", prompts=lines, reward=reward)
    if says is None:
        assert "may be a" not in caplog.text
    else:
        assert f"answers {says} `choices` (line 1: {answers[0]})" in caplog.text
    assert "do not show" not in caplog.text.replace("its values do not show", "")


def test_an_answer_that_the_prompt_explains_is_not_said(lines, caplog):
    """The prompt of MMLU letters its choices, and an index does not name a letter."""
    row = {**MMLU, "prompt": MMLU["prompt"] % "A. Rome\nB. Paris\nC. Oslo\nD. Bern"}
    lines.write_text(json.dumps({**row, "answer": "C"}))
    opened("jsonl", prompts=lines, reward="exact")
    assert not caplog.text
    lines.write_text(json.dumps({**row, "answer": "3"}))
    opened("jsonl", prompts=lines, reward="exact")
    assert "1 may be an index" in caplog.text


def test_an_index_into_options_in_fields_of_their_own_is_said(lines, caplog):
    """WinoGrande's answers begin at 1, which 2 shows."""
    rows = [{**WINOGRANDE, "answer": "1"}, {**WINOGRANDE, "answer": "2"}]
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    opened("jsonl", prompts=lines, reward="exact")
    assert "2 may be an index from 1 into `option1` and `option2` (line 1: 1)" in caplog.text


def test_a_label_that_points_at_an_ending_is_named(lines):
    """HellaSwag's ``label`` is the text of an index from 0 into ``endings``."""
    row = {"prompt": "A man sits. He", "endings": ["is up.", "sits.", "eats.", "runs."]}
    lines.write_text(json.dumps({**row, "label": "3"}))
    says = "give it as `answer` .perhaps the text of the option at which `label` points"
    with pytest.raises(ConfigError, match=says):
        opened("jsonl", prompts=lines, reward="exact")


def test_math_verify(lines):
    pytest.importorskip("math_verify")
    lines.write_text('{"prompt": "half?", "answer": "1/2"}\n')
    environment = opened("jsonl", prompts=lines, reward="math")
    scores = [environment.episode(0).step(ids(a)).reward for a in (r"so $\frac{1}{2}$", "3", "")]
    assert scores == [1, 0, 0]


@pytest.mark.parametrize(
    ("right", "answer", "reward"),
    [
        # As MATH-500's column `answer` has them.
        (r"3\sqrt{13}", r"\boxed{3\sqrt{13}}", 1),
        (r"3\sqrt{13}", r"so $\sqrt{117}$", 1),
        (r"3\sqrt{13}", "3", 0),
        (r"\left( 3, \frac{\pi}{2} \right)", r"\boxed{(3, \pi/2)}", 1),
        (r"\left( 3, \frac{\pi}{2} \right)", "3", 0),
        ("p - q", r"\boxed{-q + p}", 1),
        (r"\text{Evelyn}", r"\boxed{\text{Evelyn}}", 1),
        ("[2,5)", r"\boxed{[2, 5)}", 1),
        ("[2,5)", r"\boxed{[2, 5]}", 0),
        ("1,2,3", r"\boxed{3, 2, 1}", 1),
        ("1,2,3", "1.2", 0),
        ("3n+1", r"\boxed{1+3n}", 1),
        ("3n+1", "3", 0),
        (r"1 \pm \sqrt{19}", r"\boxed{1}", 0),
        (r"11\frac{1}{2}", r"\boxed{11.5}", 1),
        ("A", r"\boxed{A}", 1),
        ("A", r"\boxed{B}", 0),
        # Letters, as MMLU and ARC have them.
        ("(A)", "The answer is (A).", 1),
        ("A.", "Answer: A", 1),
        ("A", "**A**", 1),
        ("12", "A) 12", 1),
        ("A", "A) 12", 1),
        ("A", "B) 12", 0),
        ("A", "A good guess is 12.", 0),
        ("A", r"At first $A$, but \boxed{B}", 0),
        ("A", "a", 0),
        # The same text.
        ("proof", " proof\n", 1),
        ("proof", "no proof", 0),
        # Policies may leave marks out, too.
        (r"3\sqrt{2}", r"3\sqrt{2}", 1),
        ("3", r"3\sqrt{2}", 0),
        ("7", "**7**", 1),
        ("7", "It is 7.", 1),
        ("10", "10 m^2", 1),
        # Whole solutions and texts with a number.
        ("He has 48/2 = <<48/2=24>>24.\n#### 72", "72", 1),
        (r"So it is $\frac{1}{2}$.", "0.5", 1),
        (r"Hence \boxed{[2,5)}", r"$[2,5)$", 1),
        ("18 dollars", "18", 1),
        ("$18", "18", 1),
        ("70,000", r"\boxed{70000}", 1),
        ("90^\\circ", "90", 1),
        ("x=5", r"\boxed{5}", 1),
        ("7.", "7", 1),
    ],
)
def test_math_compares_whole_expressions(lines, right, answer, reward):
    """Values are those that mathematics says; math-verify alone finds 3 in the first."""
    pytest.importorskip("math_verify")
    lines.write_text(json.dumps({"prompt": "?", "answer": right}))
    environment = opened("jsonl", prompts=lines, reward="math")
    assert environment.episode(0).step(ids(answer)).reward == reward


# ---- calls -------------------------------------------------------------------------------------


def test_calls_that_fail_do_not_touch_the_others():
    async def later(value):
        await asyncio.sleep(0.05)
        return value

    async def never():
        await asyncio.sleep(3600)

    def ends():
        raise SystemExit(3)

    async def cancelled():
        raise asyncio.CancelledError

    calls = Calls(limit=0.4)
    calls.start("now", lambda: 1)
    calls.start("raises", lambda: 1 / 0)
    calls.start("ends", ends)
    calls.start("hangs", time.sleep, 3600)
    calls.start("later", later, 2)
    calls.start("never", never)
    calls.start("cancelled", cancelled)
    started = time.monotonic()
    found = calls.all_finished()
    assert time.monotonic() - started < 5
    assert (found["now"], found["later"]) == (1, 2)
    reasons = {"hangs": "timeout", "never": "timeout"} | dict.fromkeys(
        ("raises", "ends", "cancelled"), "raised"
    )
    assert {key: found[key].reason for key in reasons} == reasons
    assert "ZeroDivisionError" in found["raises"].detail
    assert found["hangs"] == Failed("timeout", "no answer within rl.step_timeout")
    calls.start("again", later, 3)  # beside cancelled and hanging calls
    assert calls.all_finished() == {"again": 3}


def test_plain_calls_are_waited_for_and_others_are_not():
    go = threading.Event()

    async def waits():
        while not go.is_set():
            await asyncio.sleep(0.01)
        return "done"

    def slow():
        time.sleep(0.1)
        return "slow"

    calls = Calls(limit=60)
    calls.start("b", waits)
    calls.start("a", slow)
    assert calls.finished() == [("a", "slow")]
    assert calls.finished() == []
    go.set()
    assert calls.all_finished() == {"b": "done"}


def test_slow_calls_are_made_together():
    calls = Calls(limit=60)
    started = time.monotonic()
    for i in range(300):
        calls.start(i, time.sleep, 0.2)
    assert calls.finished() == [(i, None) for i in range(300)]
    assert time.monotonic() - started < 10  # one after the other they take a minute


def test_calls_share_the_threads_that_the_system_allows(monkeypatch):
    start, started = threading.Thread.start, []

    def start_four(thread):
        if len(started) == 4:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_four)
    calls = Calls(limit=0.3)
    for i in range(20):
        calls.start(i, time.sleep, 0.05)  # seven rounds of three threads, longer than the limit
    assert calls.finished() == [(i, None) for i in range(20)]
    for i in range(20):
        calls.start(i, time.sleep, 3600)
    begin = time.monotonic()
    found = dict(calls.finished())
    assert time.monotonic() - begin < 5
    assert {result.reason for result in found.values()} == {"timeout"}
    assert [len([r for r in found.values() if "thread" in r.detail]), len(found)] == [17, 20]


# ---- which prompts when ------------------------------------------------------------------------


def test_the_window_of_its_docstring():
    window = PromptWindow(ahead=4)
    assert window.advance(4) == (range(8), range(4))
    assert window.advance(4) == (range(8, 12), range(4, 8))
    assert window.advance(2) == (range(12, 14), range(8, 10))  # groups that replace others
    assert window.advance(4) == (range(14, 18), range(10, 14))
    assert PromptWindow(ahead=0).advance(3) == (range(3), range(3))


def test_tasks_are_held_out_or_trained_each_once_an_epoch():
    tasks = Tasks(10, 3, seed=1)
    held_out = [tasks.held_out(i) for i in range(3)]
    first, second = ([tasks.trained(e * 7 + i) for i in range(7)] for e in range(2))
    assert sorted(held_out + first) == sorted(held_out + second) == list(range(10))
    assert first != second
    assert held_out == [Tasks(10, 3, seed=2).held_out(i) for i in range(3)]
    assert first == [Tasks(10, 3, seed=1).trained(i) for i in range(7)]
    endless = Tasks(None, 3, seed=1)
    assert [endless.held_out(2), endless.trained(0), endless.trained(9)] == [2, 3, 12]
    with pytest.raises(ConfigError, match=r"rl.eval_tasks: 10 of 10"):
        Tasks(10, 10, seed=0)


def test_quick_calls_are_not_late_behind_others():
    calls = Calls(limit=0.5)
    for i in range(300):
        calls.start(i, time.sleep, 0.003)
    assert [result for _, result in calls.finished()] == [None] * 300


def test_quick_calls_share_a_thread():
    calls = Calls(limit=60)
    before = threading.active_count()
    for _ in range(3):
        for i in range(500):
            calls.start(i, pow, i, 2)
        assert calls.finished() == [(i, i * i) for i in range(500)]
    # The loop's threads, and some for times without a free core.
    assert threading.active_count() - before < 50


def test_a_file_named_relatively_knows_its_whole_path(tmp_path, monkeypatch):
    """A reward that starts its own file in another folder, as examples/code_reward.py does."""
    (tmp_path / "rewards.py").write_text("def here(line, text):\n    return len(__file__)\n")
    (tmp_path / "lines.jsonl").write_text(json.dumps({"prompt": "a", "answer": "b"}))
    monkeypatch.chdir(tmp_path)
    environment = opened("jsonl", prompts="lines.jsonl", reward="rewards.py:here")
    episode = environment.episode(0)
    episode.reset()
    assert episode.step(ids("yes")).reward == len(str(tmp_path / "rewards.py"))


def test_rewards_see_special_tokens_where_they_are_asked_for(tmp_path):
    (tmp_path / "rewards.py").write_text("def last(line, text):\n    return len(text)\n")
    lines = tmp_path / "lines.jsonl"
    lines.write_text(json.dumps({"prompt": "a", "answer": "b"}))
    given = {"prompts": lines, "reward": f"{tmp_path}/rewards.py:last"}
    for skips, expected in ((True, "yes"), (False, "yes<|endoftext|>")):
        environment = opened("jsonl", skip_special_tokens=skips, **given)
        episode = environment.episode(0)
        episode.reset()
        assert episode.step(ids("yes")).reward == len(expected)


@pytest.mark.parametrize(
    "values",
    [{"env": "sort"}, {"env": "reasoning-gym:x"}, {"env": "agent:a.py:f"}]
    + [{"env": "jsonl", "prompts": "a.jsonl", "reward": name} for name in ("exact", "math")],
    ids=lambda values: str([*values.values()]),
)
def test_special_tokens_are_for_rewards_of_ones_own(values):
    with pytest.raises(ConfigError, match=r"^rl\.skip_special_tokens: no, but only a reward or"):
        open_environment(settings(skip_special_tokens=False, **values), TOKENIZER)
