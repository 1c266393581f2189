"""Reads records of public data sets with forms of their own, and says what to do with others.

A record is read if its fields tell what is asked and what is answered. The sets with such records
are Glaive's and xLAM's function calling, runs of SWE-agent, the conversations of Capybara, XTuner
and Firefly, the answers of Llama-Nemotron, Dolphin-R1 and WildJailbreak, Magicoder's problems,
MedMCQA's options, PubMedQA's abstracts, and pairs of SHP and of Stack Exchange. Other sets leave a
choice to the user, such as which of two judgements counts (PKU-SafeRLHF) or how good an answer must
be (HelpSteer). Their records are refused, and the error says what to write instead
(:func:`remedy_for`).

Left out on purpose: records that differ from the published records of their set.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from moetrain.config.sources import shortened
from moetrain.data.lost import (
    PARTS,
    PASSAGES,
    bad_value_of_flag,
    describes,
    example_of_text,
    is_about_answer,
    is_about_question,
    is_feedback,
    is_http_response,
    is_label,
    is_score,
    may_be_asked,
    names_verdict,
    order_of_turns,
    place_of_answer,
    request_in,
    systems_of_request,
    texts_of_part,
    thoughts_of_field,
)
from moetrain.data.messages import (
    BadLineError,
    is_dialogue,
    is_message,
    is_role,
    is_said,
    learning_of,
    parse_json,
    role_of,
    rows_of,
    shows_pythons_turns,
    turns_in,
    value_in,
    words_of,
)
from moetrain.data.options import choices_of, kind_of, pointer_in
from moetrain.data.tools import are_tools, names_of_tools

_GLAIVE_TURN = re.compile(r"(?:\A|\n\n)\s*(USER|ASSISTANT|FUNCTION RESPONSE):")
_GLAIVE_ROLES = {"USER": "user", "ASSISTANT": "assistant", "FUNCTION RESPONSE": "tool"}
_GLAIVE_INTRODUCTION = (
    "You are a helpful assistant with access to the following functions. Use them if required -"
)
"""The text before the functions in a system turn. It is dropped once the functions are read."""
_GLAIVE_CALL = re.compile(r'\{\s*"name":\s*"([^"]+)"\s*(?:,\s*"arguments":\s*(.*?))?\s*\}', re.S)

_OF_EXCHANGES = {"system", "input", "output", "human", "assistant", "need_eos_token", "role"}
"""Keys of a question with its answer that are read."""

ABOUT = {
    *("id", "uuid", "source", "dataset", "data_source", "resource", "license", "url", "split"),
    *("type", "category", "subject", "topic", "tags", "difficulty", "level", "lang", "language"),
    *("language_code", "annotation_type", "user_id"),  # Aya's
    *(
        "original_question",
        "orig_question",
        "orig_answer",
        "created",
        "timestamp",
        "score",
        "label",
        "kto_tag",
        "weight",
    ),
    *(
        "system",
        "system_prompt",
        "history",
        "tools",
        "functions",
        "chat_template_kwargs",
        "rejected_response",
    ),
}
"""Fields that may stand beside a question and its answer. Some of them are read too, and the others
describe the question or the answer."""
QUESTIONS = ("question", "query", "inputs", "inputs_pretokenized")
RESPONSES = ("answer", "response", "targets", "targets_pretokenized")
"""Names of a question and of its answer, in lower case: those of GSM8K, MetaMathQA, CodeFeedback,
OpenOrca and ms-swift; of FLAN, xP3 and Aya; and of P3."""
QUESTION_OF = {"output": "input", "target": "input"}
"""For these names of an answer, the name of its question: OpenCodeReasoning's and Firefly's."""
_SAID = ("output", *RESPONSES)
"""Names of the answer to a question that is a list of turns, in lower case."""
_METADATA = ("metadata", "meta", "extra", "extra_info")
"""Fields that describe a record. In Nemotron's records such a field holds the tools."""

_QUESTIONS = ("prompt", "question", "query", "problem", "inputs", "inputs_pretokenized")
_ANSWERS = {
    *("completion", "chosen", "response", "output", "answer", "solution", "target", "label"),
    *("ground_truth", "reference", "rejected", "text", "targets", "targets_pretokenized"),
}
"""Fields that may be an answer to a prompt."""
_OF_TWO = re.compile(
    r"(?:orig_)?(?:response|answer|completion|conversation|conv|output)_?[012ab]", re.I
)
"""Matches the name of one of two answers: PKU-SafeRLHF's, HelpSteer's, WebGPT's, Arena's."""
_ASKED_BESIDE_OPTIONS = {"sentence", "goal", "stem", "instruction", "premise", "hypothesis"}
"""Further names of a question with options: WinoGrande's, PIQA's, COPA's."""
_JUDGES = re.compile(
    r".*_response_id|(?:overall_|orig_)?preference(?:_strength)?|winner(?:_model_[ab])?|label"
)
"""Matches names of fields that tell which of two answers is better."""
_SIGNED_JUDGES = ("overall_preference", "preference_strength")
"""Judges of HelpSteer3 and HelpSteer2, from -3 (the first answer is much better) to 3."""
_SCORE_OF_TWO = re.compile(r"(?:conv_)?(?:score|rating|reward)s?_?[012ab]|conv_[ab]_rating", re.I)
"""Matches the score of one of two answers: WebGPT's."""
_STEP = "\u043a\u0438"
"""The mark behind each step of Math-Shepherd's answers."""
_OF_PAIRS = {"chosen", "rejected", "label"}
"""Fields of pairs and of labelled answers."""
_QUESTIONS_OF_PAIRS = ("prompt", "question", "instruction", "input")
"""Fields that may hold the question of a pair."""
_OF_ANSWERS = r"(?:edited_)?(?:resp|response|answer|output|completion)"
_BETTER = re.compile(
    rf"(?:pos|positive|good|better|preferred|accepted|winning|win)_{_OF_ANSWERS}"
    r"|preferred|accepted|win|winning"
)
_WORSE = re.compile(
    rf"(?:neg|negative|bad|worse|dispreferred|rejected|losing|lose)_{_OF_ANSWERS}"
    r"|dispreferred|rejected|lose|losing"
)
"""Match names of the better and of the worse one of two answers."""
_SEVERAL = ("answers", "completions", "generations", "responses", "summaries")
"""Fields with a list of answers: Nectar's and Stack Exchange's, UltraFeedback's, distilabel's, and
those of OpenAI's comparisons of summaries."""
_OF_TOOLS = {"tool", "tools", "function", "functions", "api", "apis"}
"""Words in the names of lists of tools."""
_TURNS_IN_OBJECTS = ("messages", "input", "prompt", "conversation", "conversations")
"""Keys of the turns of a question in an object: those of a request."""
_SEVERAL_QUESTIONS = {"questions", "queries", "instructions", "inputs", "prompts"}
"""Fields with a list of questions."""
_HOLDERS = {
    *("data", "records", "rows", "examples", "items", "instances", "entries", "samples", "dataset"),
    *("train", "training", "dev", "valid", "validation", "test"),
}
"""Fields of a file's object that hold its records: SQuAD's and CoQA's ``data``."""
_TEXTS_OF_ROUNDS = ("input_text", "text", "content", "question", "answer", "texts")
"""Keys of a question's or an answer's text in such a list: CoQA's."""
_OF_POLICY = (
    "let a policy answer it for a reward: moetrain rl reads `prompt` or `messages` from rl.prompts"
)
_AS_IT_IS = " (joined to `prompt` without a separator)"
_FOR_PLAIN_TEXT = (
    f" for plain text{_AS_IT_IS}, or write both as `instruction` and `output` for a chat"
)
"""The end of advice to write a field as ``completion``, if ``prompt`` is a text."""
_PROGRAMS = {"code", "program", "sql"}
"""Names of an answer that is a program: MBPP's. Beside another answer, it may be what is asked."""
_NO_SCORES = {
    "id",
    "key",
    "idx",
    "index",
    "num",
    "length",
    "token",
    "tokens",
    "turn",
    "turns",
    "seed",
    *("hash", "time", "timestamp", "date", "year", "version", "count"),
    *("annotator", "annotation", "worker", "user", "author"),
}
"""Words in the names of fields whose number does not judge an answer: tiny-codes' ``idx``,
Prodigy's ``_task_hash``, Label Studio's ``lead_time`` and ``annotator``."""
_OF_STATES = {"status", "state", "ticket", "case", "issue", "request", "conversation"}
"""Words in the names of how far a matter has come, such as a ticket's ``Status``, which is solved
whatever was answered."""
_LISTS_OF_TEXTS = {
    *("dialog", "dialogs", "dialogue", "dialogues", "conversation", "turns", "utterances", "data"),
    "chat",
}
"""Fields that hold the texts of a dialogue: in DailyDialog, SODA, UltraChat, PIPPA and MOSS."""
_LISTS_OF_TURNS = _LISTS_OF_TEXTS - {"data"}
"""Of these, those whose questions and answers are turns and no records."""
_ASKED_IN_RECORDS = (
    *("input", "question", "query", "problem", "inputs", "prompt", "instruction", "user", "human"),
)
"""Names of a question in a list of records, the likeliest first."""
_OF_EXAMPLES = {"example", "examples", "negative", "demonstration", "demonstrations"}
"""Words in the names of lists of records that only show what is meant."""
_WHO = {"role", "author", "from", "sender", "speaker", "user"}
"""Words in the names of who said a turn."""
_WHAT = {"content", "body", "text", "message", "value", "parts", "utterance"}
"""Words in the names of what was said in a turn."""
_ASKING = {"prompt", "question", "query", "instruction", "problem", "user", "input"}
_OF_WRONG = {
    *("incorrect", "wrong", "false", "bad", "negative", "rejected", "distractor", "distractors"),
}
"""Words in the names of answers that are not right ones: GPQA's ``Incorrect Answer 1``."""
_OF_SAMPLES = {"responses", "answers", "completions", "generations", "solutions", "outputs"}
"""Words in the names of lists of answers."""
_ANSWERING = {
    *("answer", "response", "completion", "solution", "attempt", "assistant", "output", "reply"),
    *("generation", "summary", "highlights"),
}
"""Words in the names of fields that hold what is asked, and of fields that hold an answer."""

_MEDMCQA = {"A": "opa", "B": "opb", "C": "opc", "D": "opd"}
"""The letters of MedMCQA's options, and their fields. Its ``cop`` is an index from 0 into them."""
_OF_OTHER_FORMS = {
    *("instruction", "output", "prompt", "completion", "chosen", "rejected", *RESPONSES),
}
"""Fields of another form. Beside them MedMCQA's ``cop`` or PubMedQA's ``long_answer`` is not the
only answer."""
_DECISIONS = ("yes", "no", "maybe")
"""What PubMedQA's ``final_decision`` may be."""
_BESIDE_ABSTRACT = ("meshes", "reasoning_required_pred", "reasoning_free_pred")
"""Keys of PubMedQA's ``context`` that are not shown: its subject terms, and decisions that its
annotators made with and without the conclusion."""


def read_known_set(found: dict[str, Any]) -> None:
    """Convert a record of a known set, in place, into one of the general forms.

    Raises BadLineError: the record is of such a set, but a part of it cannot be read.
    """
    chat = found.get("chat")
    if isinstance(chat, str) and re.match(r"\s*USER:", chat):
        _read_glaive(found)
    if _is_swe_agents(found.get("trajectory")):
        _read_swe_agent(found)
    if {"query", "tools", "answers"} <= found.keys() and isinstance(found["query"], str):
        _read_xlam(found)
    if {"history", "human_ref_A", "human_ref_B", "labels"} <= found.keys():
        _read_shp(found)
    if {"question", "response_j", "response_k"} <= found.keys():  # response_j has more votes
        found["chosen"], found["rejected"] = found.pop("response_j"), found.pop("response_k")
    if {"problem", "solution", "seed", "lang"} <= found.keys():  # Magicoder-OSS-Instruct
        found["instruction"], found["output"] = found.pop("problem"), found.pop("solution")
    steps = found.get("initial_reason_steps")
    if isinstance(steps, str) and steps.strip() and {"chosen", "rejected"} <= found.keys():
        said = (
            f"`initial_reason_steps` stands between the prompt and the answers: {shortened(steps)}"
        )
        prompt = found.get("prompt")
        if not isinstance(prompt, str) or not prompt.rstrip().endswith(steps.rstrip()):
            raise BadLineError(f"{said}; write it at the end of `prompt`, behind a line break")
    if "chosen" not in found and _are_exchanges(found.get("conversation")):
        _read_exchanges(found)
    if {"vanilla", "completion"} <= found.keys() and "prompt" not in found:
        asked = [found.pop(key, None) for key in ("adversarial", "vanilla")]  # WildJailbreak
        found["instruction"] = next(filter(None, asked), "")
        found["output"] = found.pop("completion")
    is_medmcqas = {"question", "cop", *_MEDMCQA.values()} <= found.keys()
    if is_medmcqas and _OF_OTHER_FORMS.isdisjoint(found):
        _read_medmcqa(found)
    is_pubmedqas = {"question", "context", "long_answer"} <= found.keys()
    if is_pubmedqas and _OF_OTHER_FORMS.isdisjoint(found):
        _read_pubmedqa(found)
    _read_asked_turns(found)


def _read_asked_turns(found: dict[str, Any]) -> None:
    """Read a question that is a list of turns, or the text of its JSON, with its answer.

    These are records of Llama-Nemotron, and what Langfuse exports. The answer is a text, a message
    of the assistant or a list of such, or the text of their JSON.

    Raises BadLineError: the question is Python's notation of messages.
    """
    if "instruction" not in found:  # otherwise the text belongs to the instruction
        for key in [key for key in found if key.lower() in ("input", *QUESTIONS)]:
            if isinstance(found[key], str) and _shows_answered_turns(found[key]):
                continue
            turns = turns_in(found[key], key)
            found[key] = turns if _ends_asking(turns) else _with_messages(found[key])
    asked = [key for key in found if key.lower() in ("input", *QUESTIONS)]
    asked = [key for key in asked if _ends_asking(found[key])]
    if len(asked) != 1:
        return
    answers = {key: _answer_in(found, key) for key in found if key.lower() in _SAID}
    said = [key for key in answers if answers[key]]
    if len(said) == 1:
        found["prompt"], found["completion"] = found.pop(asked[0]), answers[said[0]]
        del found[said[0]]


def _shows_answered_turns(text: str) -> bool:
    """Return whether ``text`` is what Python shows of a dialogue that ends with an answer."""
    if not shows_pythons_turns(text):
        return False
    roles = re.findall(r"'(?:role|from)':\s*'([^']*)'", text)
    return bool(roles) and role_of({"role": roles[-1]}) == "assistant"


def _ends_asking(turns: object) -> bool:
    """Return whether ``turns`` is a dialogue that ends with a question or a tool's result."""
    if not isinstance(turns, list) or not is_dialogue(turns):
        return False
    return isinstance(turns[-1], dict) and role_of(turns[-1]) in ("user", "tool")


def _with_messages(value: Any) -> Any:
    """Return the object whose JSON ``value`` is if it has ``messages``, otherwise ``value``."""
    if isinstance(value, str) and value.lstrip().startswith("{") and '"messages"' in value:
        with suppress(ValueError, RecursionError):
            found = json.loads(value)
            if is_dialogue(found.get("messages")):
                return found
    return value


def _answer_in(found: Mapping[str, Any], key: str) -> list[Any]:
    """Return the assistant's turns in the field ``key``, or none if it holds anything else."""
    value = turns_in(found[key], key)
    if isinstance(value, str):
        return [{"role": "assistant", "content": value}]
    turns = [value] if isinstance(value, dict) else value
    if not isinstance(turns, list) or not all(map(is_message, turns)):
        return []
    return turns if all(role_of(turn) == "assistant" for turn in turns) else []


def read_reasoned_answer(found: dict[str, Any]) -> None:
    """Add Dolphin-R1's ``reasoning`` and ``answer`` to ``messages`` that end with a question.

    Raises BadLineError: the messages end with another turn, or ``answer`` is no text.
    """
    turns, answer = found.get("messages"), found.get("answer")
    if not {"reasoning", "answer"} <= found.keys() or not isinstance(turns, list):
        return
    if not is_dialogue(turns):
        return
    if not isinstance(answer, str) or role_of(turns[-1]) != "user":
        problem = "`reasoning` and `answer` stand beside `messages` that have an answer"
        raise BadLineError(f"{problem}: {shortened(answer)}; leave them, or that turn, out")
    said = {"role": "assistant", "reasoning_content": found.pop("reasoning")}
    found["messages"] = [*turns, {**said, "content": found.pop("answer")}]


def with_tools_of_metadata(record: dict[str, Any]) -> dict[str, Any]:
    """Return ``record`` with the tools of its metadata in ``tools``.

    Tools outside the metadata take precedence. Then the record is returned as it is.
    """
    found = {**record}
    if not found.get("tools") and not found.get("functions"):
        tools = next(filter(None, (_tools_in(found.get(key)) for key in _METADATA)), None)
        found |= {"tools": tools} if tools else {}
    return found


# ---- reading ------------------------------------------------------------------------------------


def _tools_in(metadata: object) -> list[Any] | None:
    """Return the tools in ``metadata``, an object or the text of its JSON. None: there are none."""
    if isinstance(metadata, str) and metadata.lstrip().startswith("{") and '"tools"' in metadata:
        metadata = parse_json(metadata, "metadata")
    tools = metadata.get("tools") if isinstance(metadata, dict) else None
    if isinstance(tools, str) and tools.lstrip().startswith("["):
        tools = parse_json(tools, "`tools` of metadata")
    # A template cannot use names of tools alone.
    return tools if isinstance(tools, list) and are_tools(tools) else None


def _read_glaive(found: dict[str, Any]) -> None:
    """Read Glaive's function calling v2. Its ``system`` and ``chat`` are one text each."""
    chat = found.pop("chat")
    marks = list(_GLAIVE_TURN.finditer(chat))
    ends = [*(mark.start() for mark in marks[1:]), len(chat)]
    found["messages"] = [
        _glaive_turn(mark[1], chat[mark.end() : end].strip())
        for mark, end in zip(marks, ends, strict=True)
    ]
    system = found.pop("system", None) or ""
    if not isinstance(system, str):
        raise BadLineError(f"`system` is not text: {shortened(system)}; write a text there")
    system = re.sub(r"\A\s*SYSTEM:\s*", "", system).strip()
    start = system.find("{")
    tools = _objects_in(system[start:]) if start >= 0 else []
    if tools and all(isinstance(tool.get("name"), str) for tool in tools):
        found["tools"], system = tools, system[:start].strip()
        system = "" if system == _GLAIVE_INTRODUCTION else system
    if system:
        found["system"] = system


def _glaive_turn(mark: str, text: str) -> dict[str, Any]:
    """Read a turn that begins with ``mark``.

    Raises BadLineError: the text holds two turns, or a call that cannot be read.
    """
    role = _GLAIVE_ROLES[mark]
    text = text.removesuffix("<|endoftext|>").rstrip() if role == "assistant" else text
    if "<|endoftext|>" in text:
        said = f"`chat` has <|endoftext|> within a turn: {shortened(text)}"
        raise BadLineError(f"{said}; leave such records out")
    before, call, written = text.partition("<functioncall>")
    if role != "assistant" or not call:
        return {"role": role, "content": text}
    parts = _GLAIVE_CALL.fullmatch(written.strip())
    arguments = parts[2] or "{}" if parts else ""
    if len(arguments) > 1 and arguments[0] == arguments[-1] == "'":
        arguments = arguments[1:-1].replace("\\'", "'")
    try:
        is_object = isinstance(parse_json(arguments, "a call"), dict)
    except BadLineError:
        is_object = False
    if parts is None or not is_object:
        said = f"`chat` has a call that cannot be read: {shortened(written.strip())}"
        raise BadLineError(f"{said}; leave such records out, or write them as `messages`")
    function = {"name": parts[1], "arguments": arguments}
    calls = [{"type": "function", "function": function}]
    return {"role": role, "content": before.strip(), "tool_calls": calls}


def _objects_in(text: str) -> list[dict[str, Any]]:
    """Return the JSON objects in ``text``. Return none if it has anything else than objects."""
    decoder, found, at = json.JSONDecoder(), [], 0
    while at < len(text):
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return []
        found.append(value)
        at += len(text[at:]) - len(text[at:].lstrip(" \n\r\t,"))
    return found if all(isinstance(value, dict) for value in found) else []


def _read_xlam(found: dict[str, Any]) -> None:
    """Read xLAM's function calling: ``query``, ``tools`` and the calls in ``answers``.

    Raises BadLineError: ``answers`` has no call, or is no list of calls.
    """
    answers = found["answers"]
    if isinstance(answers, str) and re.match(r"[^\W\d_]", answers.strip()):  # Synth-APIGen's words
        found["instruction"], found["output"] = found.pop("query"), found.pop("answers")
        return
    calls = parse_json(answers, "`answers`") if isinstance(answers, str) else answers
    if calls == []:
        said = "`answers` has no call: no tool suits the question, and nothing says what to answer"
        raise BadLineError(f"{said}; leave such records out, or write them as `messages`")
    if not isinstance(calls, list) or not all(isinstance(x, dict) for x in calls):
        said = f"`answers` is no list of calls: {shortened(answers)}"
        raise BadLineError(f'{said}; give [{{"name": ..., "arguments": {{...}}}}]')
    del found["answers"]
    asked = {"role": "user", "content": found.pop("query")}
    found["messages"] = [asked, {"role": "tool_call", "content": answers}]


def _is_swe_agents(turns: object) -> bool:
    """Return whether ``turns`` belong to a run of SWE-agent.

    Such turns have ``text`` in place of ``content``. The system turn has a null there, which tables
    leave out, and its text in ``system_prompt``.
    """
    if not isinstance(turns, list) or not turns:
        return False
    return all(
        isinstance(x, dict)
        and "role" in x
        and "content" not in x
        and not {"text", "system_prompt"}.isdisjoint(x)
        for x in turns
    )


def _read_swe_agent(found: dict[str, Any]) -> None:
    """Read a run of SWE-agent. Its system turn has its text in ``system_prompt``.

    Raises BadLineError: the run did not solve its issue.
    """
    if found.get("target") is False:  # nebius'
        problem = "`target` is false: the run did not solve its issue, and would be learned"
        remedy = "leave such records out, or take `target` out to learn them all the same"
        raise BadLineError(f"{problem}; {remedy}", kind="`target` is false")
    found["messages"] = [
        {key: turn[key] for key in turn if key not in ("text", "system_prompt")}
        | {"content": turn.get("text") or turn.get("system_prompt")}
        for turn in found.pop("trajectory")
    ]


def _are_exchanges(turns: object) -> bool:
    """Return whether ``turns`` are questions with their answers.

    Capybara and XTuner have objects with ``input``, Firefly objects with ``human`` and
    ``assistant``.
    """
    first = turns[0] if isinstance(turns, list) and turns else None
    return isinstance(first, dict) and ("input" in first or {"human", "assistant"} <= first.keys())


def _read_exchanges(found: dict[str, Any]) -> None:
    """Read a list of questions with their answers. Each question may come with a system text.

    Raises BadLineError: a question or its answer is no text, a question is empty, or an answer is
    to be learned without its end.
    """
    turns: list[dict[str, Any]] = []
    for i, each in enumerate(found.pop("conversation")):
        if isinstance(each, dict) and "input" not in each and "human" in each:
            each = {**each, "input": each.get("human"), "output": each.get("assistant")}
        for key in ("input", "output"):
            if not isinstance(each, dict) or not isinstance(each.get(key), str):
                said = f"conversation[{i}] has no text `{key}`: {shortened(each)}"
                raise BadLineError(f"{said}; give both, or write the turns as `messages`")
        if not each["input"].strip():
            said = f"conversation[{i}].input is empty: {shortened(each)}"
            raise BadLineError(f"{said}; write what answers nothing as `text`")
        if each.get("need_eos_token") is False:
            said = f"conversation[{i}].need_eos_token is false, and the template ends each turn"
            raise BadLineError(f"{said}; leave it out, or write such texts as `text`")
        if each.get("system"):
            turns.append({"role": "system", "content": each["system"]})
        learning = learning_of(each)
        rest = {key: each[key] for key in each if key not in {*_OF_EXCHANGES, *learning}}
        turns.append({**rest, "role": "user", "content": each["input"]})
        turns.append({"role": "assistant", "content": each["output"], **learning})
    found["messages"] = turns


def _read_shp(found: dict[str, Any]) -> None:
    """Read a pair of SHP. Its ``labels`` is 1 if the first answer is preferred, otherwise 0.

    Raises BadLineError: ``labels`` is neither of them.
    """
    answers, label = [found.pop("human_ref_A"), found.pop("human_ref_B")], found.pop("labels")
    if label not in (0, 1):
        said = f"`labels` is {shortened(label)}, and 1 says that `human_ref_A` is preferred"
        raise BadLineError(f"{said}, 0 that `human_ref_B` is; give one of these")
    found["question"] = found.pop("history")
    found["chosen"], found["rejected"] = answers if label else reversed(answers)


def _read_medmcqa(found: dict[str, Any]) -> None:
    """Read a question of MedMCQA, its options, and the number ``cop`` of the right one.

    The answer is the explanation ``exp``, if there is one, and the letter and text of that option.
    CSV has the number as a text.

    Raises BadLineError: ``cop`` names no option, as in the test part, or another field is no text.
    """
    for key in ("question", *_MEDMCQA.values(), "exp"):
        if not isinstance(found.get(key, ""), str):
            raise BadLineError(f"`{key}` is not text: {shortened(found[key])}; write a text there")
    cop = value_in(found["cop"])
    if isinstance(cop, bool) or cop not in range(len(_MEDMCQA)):
        is_test = cop == -1
        why = "; -1 says that it is not known, as in MedMCQA's test part" if is_test else ""
        raise BadLineError(
            f"`cop` is {shortened(found['cop'])}, and 0 to 3 name the right one of `opa` to "
            f"`opd`{why}; leave such records out (data.bad_records skip)",
            kind="`cop` is -1" if is_test else "`cop` is no option",
        )
    del found["cop"]
    options = {letter: found.pop(key) for letter, key in _MEDMCQA.items()}
    listed = [f"{letter}. {option}" for letter, option in options.items()]
    explained = found.pop("exp", "")
    found["instruction"] = "\n".join([found.pop("question"), "", *listed])
    answer = f"Answer: {listed[int(cop)]}"
    found["output"] = f"{explained}\n\n{answer}" if explained.strip() else answer


def _read_pubmedqa(found: dict[str, Any]) -> None:
    """Read a question of PubMedQA, the abstract that answers it, the conclusion and the decision.

    CSV has ``context`` as the text of its JSON. A ``context`` without ``contexts`` is of another
    set, and the record is left as it is. Keys of ``context`` that are not PubMedQA's stay there.

    Raises BadLineError: a field that should be text is not, a text of the abstract has no label or
    a label no text, or the decision is another than yes, no and maybe.
    """
    context = _with_contexts(found["context"])
    if context is None:
        return
    for key in ("question", "long_answer"):
        if not isinstance(found[key], str):
            raise BadLineError(f"`{key}` is not text: {shortened(found[key])}; write a text there")
    texts, labels = context.pop("contexts"), context.pop("labels", None)
    for key, values in (("contexts", texts), ("labels", labels)):
        if not isinstance(values, list) or not all(isinstance(x, str) for x in values):
            said = f"`context.{key}` is no list of texts: {shortened(values)}"
            raise BadLineError(f"{said}; give a label for each text of the abstract")
    if len(labels) != len(texts):
        raise BadLineError(
            f"`context.labels` is {shortened(labels)}, {len(labels)} for the {len(texts)} texts of "
            "`context.contexts`; give a label for each text of the abstract",
            kind="`context.labels` has not a label for each text",
        )
    decision = found.pop("final_decision", None)
    if decision not in (None, *_DECISIONS):
        raise BadLineError(
            f"`final_decision` is {shortened(decision)}, and is yes, no or maybe in PubMedQA; "
            "write one of these, or leave the field out to learn `long_answer` alone",
            kind="`final_decision` is no decision",
        )
    del found["context"]
    found.pop("pubid", None)
    rest = {key: context[key] for key in context if key not in _BESIDE_ABSTRACT}
    if rest:
        found["context"] = rest
    abstract = [f"{label}: {text}" for label, text in zip(labels, texts, strict=True)]
    asked, answer = found.pop("question"), found.pop("long_answer")
    found["instruction"] = "\n".join([*abstract, "", asked]) if abstract else asked
    decided = f"Answer: {decision}" if decision else ""
    found["output"] = "\n\n".join(filter(str.strip, (answer, decided)))


def _with_contexts(value: object) -> dict[str, Any] | None:
    """Return a copy of PubMedQA's ``context``, an object or the text of its JSON. None: it is none.

    It is told by its ``contexts``.
    """
    if isinstance(value, str) and value.lstrip().startswith("{") and '"contexts"' in value:
        with suppress(ValueError, RecursionError):
            value = json.loads(value)
    return {**value} if isinstance(value, dict) and "contexts" in value else None


# ---- advice for other records -------------------------------------------------------------------


def remedy_for(
    record: Mapping[str, Any],
    *,
    reads_pairs: bool = False,
    reads_labels: bool = False,
    reads_margins: bool = False,
) -> str | None:
    """Return the advice for a ``record`` of no known form. None: there is no advice.

    Args:
        record: the record.
        reads_pairs: True: only pairs are learned.
        reads_labels: True: single answers with a label are learned too, both good and bad ones.
        reads_margins: True: the ``margin`` of a pair is learned.
    """
    record = {key: _as_turns(value) for key, value in record.items()}
    said = (
        (None if reads_pairs else _remedy_for_rounds(record))
        or _remedy_for_steps(record, reads_pairs, reads_labels)
        or remedy_for_two(record, reads_margins=reads_margins)
        or _remedy_for_several(record, reads_pairs, reads_labels)
    )
    if said is not None:
        return said
    if reads_pairs and {"parent_id", "role"} <= record.keys():  # oasst's flat files
        by = ", by `rank`," * ("rank" in record)
        order = order_of_turns(record)
        return (
            f"it is one turn of a tree; write the turns up to a question{order}, as `prompt`, and "
            f"of its answers a better one{by} as `chosen` and a worse one as `rejected`"
        )
    if reads_pairs:
        write = "write the better of two answers as `chosen`, the other as `rejected`"
        said = f"it has a question without two answers; {write}, or {_OF_POLICY}"
        return said if _asks(record) else None
    return (
        _remedy_for_issue(record)
        or _remedy_for_session(record)
        or _remedy_for_served(record)
        or _remedy_for_response(record, reads_labels)
        or _remedy_for_records(record)
        or _remedy_for_file(record)
        or _remedy_for_alternatives(record)
        or (None if _asked(record) else _remedy_for_texts(record))
        or _remedy_for_objects(record)
        or _remedy_for_question(record)
        or _remedy_for_turns(record)
        or _remedy_for_thoughts(record)
    )


def _as_turns(value: Any) -> Any:
    """Return the turns of an object of columns that say who spoke and what was said, such as
    MultiWOZ's ``speaker`` and ``utterance``. Return any other value unchanged."""
    names = {word for key in value for word in words_of(key)} if isinstance(value, dict) else set()
    has_both = not names.isdisjoint(_WHO) and not names.isdisjoint(_WHAT)
    return (rows_of(value) or value) if has_both else value


def _remedy_for_steps(
    record: Mapping[str, Any], reads_pairs: bool, reads_labels: bool
) -> str | None:
    """Return the advice for a tree of messages, translations, pieces of a text with a mask each, a
    run without roles, or steps with verdicts. None: the record holds none of these."""
    for key, value in record.items():
        if isinstance(value, dict) and isinstance(value.get("replies"), list):
            write = "write each path from its root to a leaf as `messages`"
            if reads_pairs:
                write = "write each path from its root to a question as `messages`, the better one "
                write += "of two replies to it as `chosen`, the other as `rejected`"
            return f"`{key}` is a tree of messages; {write}"
    languages = record.get("translation")
    if isinstance(languages, dict) and len([x for x in languages.values() if _is_text(x)]) > 1:
        if reads_pairs or reads_labels:
            return _remedy_for_translations(languages, reads_labels)
        return (
            "`translation` has a text for each language; write what is asked, with one of them, as "
            "`instruction` and the other as `output`"
        )
    for key, run in record.items():
        first = run[0] if isinstance(run, list) and run and isinstance(run[0], dict) else {}
        if "role" not in first and not {"action", "class_"}.isdisjoint(first):  # the ADP's too
            history = " (SWE-agent's `history`)" * (key == "trajectory")
            write = f"write its turns{history} as `messages`"
            if reads_pairs:
                write = (
                    f"write its turns{history} up to a choice as `prompt`, the better one of two "
                )
                write += "turns that may follow as `chosen`, the other as `rejected`"
            return f"`{key}` is a run without roles; {write}"
    if record.get("completions") is not None and isinstance(record.get("labels"), list):
        joined = _AS_IT_IS if isinstance(record.get("prompt"), str) else ""
        chat = ", or write both as `instruction` and `output` for a chat" * bool(joined)
        if reads_labels:
            write = f"write the steps as one text in `completion`{joined}{chat}, beside a `label` "
            write += "that is true if all of them are right, and false if not"
        elif reads_pairs:
            write = "write the steps of a right answer as one text in `chosen`, and those of a "
            write += f"wrong answer to the same `prompt` in `rejected`{joined}"
            write += ", or rename `prompt` to `question` for a chat" * bool(joined)
        else:
            write = f"write the steps of a right answer as one text in `completion`{joined}{chat}"
        return (
            "`completions` and `labels` are the steps of one answer with a verdict on each (TRL's "
            "stepwise supervision), which no train.objective learns; leave such records out, or "
            f"{write}"
        )
    key = next((key for key in record if _has_verdicts_of_steps(key, record)), None)
    if key is not None:
        return (
            f"`{key}` has a verdict on each step of an answer, which no train.objective learns; "
            "leave such records out, or write the steps of a right answer as one text, without "
            "marks, as `output` beside the question as `instruction` (train.objective next_token)"
        )
    return None


def _remedy_for_translations(translation: Mapping[str, Any], reads_labels: bool) -> str:
    """Return the advice for a text and its translations where pairs or labels are learned.

    ALMA-R-Preference has ``en``, and ``de``, ``alma_de`` and ``gpt4_de`` with a score of each, such
    as ``alma_de_kiwi``.

    Args:
        translation: the texts, by their languages, and the scores.
        reads_labels: True: single answers with a label are learned too.
    """
    texts = [key for key, x in translation.items() if _is_text(x) and not describes(key, x)]
    codes = [key.rpartition("_")[2] for key in texts]
    code = max(codes, key=codes.count)
    several = [key for key, each in zip(texts, codes, strict=True) if each == code]
    asked = [key for key in texts if key not in several]
    if len(several) < 2 or not asked:
        problem = "`translation` has a text for each language, and no second translation"
        question, others = "the text to translate", "the better one of two translations"
        answer = "the other text"
    else:
        problem = f"`translation` has several texts of one language, {_all_of(several)}"
        scores: dict[str, list[str]] = {}
        for key in sorted(key for key in translation if f"_{code}_" in f"_{key}_"):
            if type(translation[key]) in (int, float):
                scores.setdefault(f"_{key}".rpartition(f"_{code}_")[2], []).append(key)
        by = f", by {_all_of(max(scores.values(), key=len))}," if scores else ""
        question, others, answer = _one_of(asked), f"a better one of them{by}", "one of them"
    write = f"write what is asked, with {question},"
    pair = f"{others} as `chosen`, another as `rejected`"
    if reads_labels:
        label = f"as `instruction` and {answer} as `output`, beside a `label` that is true or false"
        return f"{problem}; {write} {label}, or, as `question`, beside {pair}"
    return f"{problem}; {write} as `prompt`, or as `question` for a chat, {pair}"


def _has_verdicts_of_steps(key: str, record: Mapping[str, Any]) -> bool:
    """Return whether the field ``key`` has verdicts on the steps of an answer.

    PRM800K's ``label`` has a rating of each step. Math-Shepherd's ``label`` repeats ``input``, with
    a sign in place of the mark behind each step.
    """
    value = record[key]
    if isinstance(value, dict) and isinstance(steps := value.get("steps"), list) and steps:
        inner = steps[0].get("completions", [steps[0]]) if isinstance(steps[0], dict) else None
        first = inner[0] if isinstance(inner, list) and inner else None
        return isinstance(first, dict) and "rating" in first
    marked = record.get("input")
    if key != "label" or not isinstance(value, str) or not isinstance(marked, str):
        return False
    return _STEP in marked


def remedy_for_two(record: Mapping[str, Any], *, reads_margins: bool = False) -> str | None:
    """Return the advice for a record with two answers. None: it does not have two.

    ``reads_margins`` is True if the ``margin`` of a pair is learned.
    """
    fields = sorted(key for key, value in record.items() if value is not None)
    also = _also_original(record) or f"{_also_prompt(record)}{_for_chat(record)}"
    better, worse = (next(filter(x.fullmatch, fields), None) for x in (_BETTER, _WORSE))
    if better is not None and worse is not None and "chosen" not in fields:
        and_worse = f" and `{worse}` as `rejected`" * (worse != "rejected")
        return f"write `{better}` as `chosen`{and_worse}{also}"
    if len([key for key in fields if _OF_TWO.fullmatch(key)]) == 2:
        judges = " or ".join(f"`{key}`" for key in fields if _JUDGES.fullmatch(key))
        names = f", the one that {judges} names," * bool(judges)
        first, second = (key for key in fields if _OF_TWO.fullmatch(key))
        signed = [key for key in _SIGNED_JUDGES if isinstance(record.get(key), int | float)]
        if signed and (first[-1], second[-1]) == ("1", "2"):
            names = f", `{first}` where `{signed[0]}` is negative and `{second}` where it is "
            names += "positive (0 is a tie),"
        words = [key for key in fields if key.startswith("winner") and _is_text(record[key])]
        ties = "ties and `both_bad`" if words else "ties"  # Arena's
        scores = [f"`{key}`" for key in fields if _SCORE_OF_TWO.fullmatch(key)]
        if not judges and scores:
            names = f", by {' and '.join(scores)},"
        margin = ""
        if reads_margins and signed:
            margin = f", and, if you like, the size of `{signed[0]}` without its sign as `margin`"
        elif reads_margins and len(scores) == 2:
            margin = f", and, if you like, the difference of {' and '.join(scores)} as `margin`, "
            margin += "the better one's minus the other's"
        return (
            f"it has two answers; write the better one{names} as `chosen`, the other as `rejected`"
            f"{also}{margin}; leave {ties} out"
        )
    return None


def _remedy_for_several(
    record: Mapping[str, Any], reads_pairs: bool, reads_labels: bool
) -> str | None:
    """Return the advice for a record with a list of answers."""
    texts = [name for name in ("output", "completion") if _are_texts(record.get(name))]
    texts = [name for name in texts if len(record[name]) > 1]
    if texts:
        # An older form of LLaMA-Factory's pairs has the better answer first. In Natural
        # Instructions all of them are right.
        write = "write the better one as `chosen`, another as `rejected`"
        if reads_pairs or reads_labels:
            write += f"{_also_prompt(record)}; leave records out in which all are as good"
        else:
            is_asked = _is_text(record.get("input")) and record.get("instruction") is None
            also = " and `input` as `instruction`" * is_asked
            write = f"write one of them as `output`{also}, or, if one is better, {write[6:]}"
            write += _also_prompt(record)
        return f"it has several answers in `{texts[0]}`; {write}"
    if not _ANSWERS.isdisjoint(_named(record).values()):
        return None
    asked = _asked(record)
    for key in _SEVERAL:
        if isinstance(record.get(key), list) and len(record[key]) > 1:
            name = "output" if asked[:1] != ["prompt"] else "completion"
            question = f"`{asked[0]}`" if asked else "the question"
            also = f" and {question} as `instruction`"
            also *= name == "output" and record.get("instruction") is None
            pair = f"the better one as `chosen`, the other as `rejected`{_also_prompt(record)}"
            problem = f"it has several answers in `{_place_of_answer(key, record[key])}`"
            is_text = asked and isinstance(record[asked[0]], str)
            also = _AS_IT_IS if name == "completion" and is_text else also
            if reads_pairs:
                return f"{problem}; write of two answers {pair}"
            if reads_labels:
                one = f"one as `{name}`{also}, beside a `label` that is true or false"
                return f"{problem}; write {one}, or of two {pair}"
            return f"{problem}; write a good one as `{name}`{also}, or of two {pair}"
    return None


_NO_TURNS = {"summary", "system", "file-history-snapshot", "progress", "queue-operation"}
"""Types of the lines of a Claude Code session that are no turns."""


def _remedy_for_session(record: Mapping[str, Any]) -> str | None:
    """Return the advice for a line of a program's log that has a turn of a session: Claude Code's.

    Its first line may be a summary, which names the last turn by ``leafUuid``.
    """
    turn, order = record.get("message"), order_of_turns(record)
    if isinstance(turn, dict) and is_message(turn) and order:
        return (
            f"it is one turn of a session; write the `message` of all its lines{order}, as the "
            "`messages` of one record"
        )
    is_of_session = order or not {"leafUuid", "messageId"}.isdisjoint(record)
    if record.get("type") in _NO_TURNS and turn is None and is_of_session:
        return (
            f"it is a line of the type {record['type']!r} in the log of a session, and no turn; "
            "leave such lines out, and write the `message` of the lines that have one, of each "
            "session together, as the `messages` of one record"
        )
    return None


def _remedy_for_served(record: Mapping[str, Any]) -> str | None:
    """Return the advice for what a server answered, without its question.

    These are the output files of OpenAI's and Anthropic's batches, and logs of responses alone.
    """
    question = (*_QUESTIONS, *_QUESTIONS_OF_PAIRS, "messages", "conversations")
    if any(record.get(name) for name in question):
        return None
    is_batch = "custom_id" in record
    for key, value in record.items():
        if is_http_response(value) and value["status_code"] != 200:
            code = shortened(value["status_code"])
            return f"`{key}.status_code` is {code}: it has no answer; leave such records out"
        if key not in ("error", "metadata") and (place := place_of_answer(value)) is not None:
            where = f"`{key}{place}`"
            if not place.endswith(".text"):
                where += ", which is a message of the assistant,"
            question = "the question, which is not in the record,"
            asked = (request_in(*field) for field in record.items() if field[0] != key)
            if request := next(filter(None, asked), None):
                question = _parts_of_request(*request)
            elif is_batch:
                question = "the question, which the batch's input file has under the same "
                question += "`custom_id`,"
            leave = "; leave out records whose `status_code` is not 200" * is_http_response(value)
            return f"write {question} and {where} as `messages`{leave}"
    if is_batch and not {"response", "result"}.isdisjoint(record):
        return "it is a result of a batch without an answer; leave such records out"
    return None


def _parts_of_request(place: str, request: Mapping[str, Any]) -> str:
    """Say which parts of a request to a server are to be written, before its answer."""
    turns = next((key for key in ("messages", "contents") if key in request), None)
    write = f"the turns of `{place}.{turns}`" if turns else f"the question in `{place}`"
    systems = systems_of_request(request)
    # Other requests of the log may have a system's text and tools where this one has none.
    names = [key for key in systems if "[" not in key]
    if not systems:
        names = ["systemInstruction" if turns == "contents" else "system"]
    parts = [f"`{place}.{key}` as `system`" for key in names]
    parts.append(f"`{place}.tools` as `tools`")
    return f"{' and '.join(parts)} where a request has them, and {write}"


def _remedy_for_response(record: Mapping[str, Any], reads_labels: bool) -> str | None:
    """Return the advice for a `prompt` with a `response`."""
    if record.get("prompt") is None or not isinstance(record.get("response"), str):
        return None
    scores = ", ".join(f"`{key}`" for key in _judging(record))
    is_labelled = reads_labels and not (record.get("label") is record.get("kto_tag") is None)
    kept = f"{_kept(record)}write "
    if scores and reads_labels:
        kept = "write " if is_labelled else f"write `label`, true or false by {scores}, and "
    as_chat = _FOR_PLAIN_TEXT if isinstance(record["prompt"], str) else ""
    as_chat += _without_thought(record) + _also_thought(record)
    return f"{kept}`response` as `completion`{as_chat}"


def _kept(record: Mapping[str, Any]) -> str:
    """Return the advice on which records to keep, as the beginning of a sentence. Empty: none."""
    judging = _judging(record)
    bad = {key: bad_value_of_flag(key, record[key]) for key in judging}
    flags = [f"`{key}` is {str(bad[key]).lower()}" for key in judging if bad[key] is not None]
    labels = [
        key
        for key in judging
        if bad[key] is None and (is_label(record[key]) or is_feedback(key, record[key]))
    ]
    scores = [f"`{key}`" for key in judging if bad[key] is None and key not in labels]
    flags += [f"`{key}` says that the answer is a bad one" for key in labels]
    kept = [f"leave out the records whose {' or '.join(flags)}"] if flags else []
    kept += [f"keep the records whose {', '.join(scores)} suffice"] if scores else []
    return "".join(f"{each}, and " for each in kept)


def _judging(record: Mapping[str, Any]) -> list[str]:
    """Return the names of the fields that may judge the answer.

    If some fields say that they judge it, only these are named.
    """
    found = [
        key
        for key, value in record.items()
        if (
            (isinstance(value, int | float) and (type(value) is not bool or names_verdict(key)))
            or is_label(value)
            or is_feedback(key, value)
            or is_score(key, value)
            or bad_value_of_flag(key, value) is not None
        )
        and words_of(key).isdisjoint(_NO_SCORES)
        and not frozenset() < words_of(key) <= _OF_STATES
        and not is_about_question(key)
    ]
    about = [
        key
        for key in found
        if is_about_answer(key) or is_label(record[key]) or is_feedback(key, record[key])
    ]
    return about or found


def _remedy_for_question(record: Mapping[str, Any]) -> str | None:
    """Return the advice for a question, with or without an answer."""
    named, asked = _named(record), _asked(record)
    if asked and asked[0] != "prompt" and is_dialogue(record[asked[0]]):
        return None
    if (said_of_option := _remedy_for_pointer(record)) is not None:
        return said_of_option
    said = [key for key in named if named[key] in RESPONSES and isinstance(record[key], str)]
    if len(said) > 1:
        return f"it has {' and '.join(f'`{key}`' for key in said)}; leave one of them out"
    others = [
        f"`{k}`"
        for k in named.keys() - {*asked[:1], *said}
        if named[k] not in ABOUT and not describes(k, record[k])
    ]
    if asked and said and others and named[asked[0]] in QUESTIONS:
        rivals = [k for k in named if f"`{k}`" in others and named[k] in _ANSWERS - _OF_PAIRS]
        learned = f", {_one_of([*said, *rivals])}," if rivals else ""  # LIMO's `solution`
        return (
            f"{', '.join(sorted(others))} may be a part of the question or of the answer; write "
            f"what is asked as `instruction` and what is learned{learned} as `output`, and leave "
            f"the others out{_also_thought(record)}"
        )
    if not asked and isinstance(record.get("input"), str) and isinstance(record.get("output"), str):
        thought = _without_thought(record) + _also_thought(record)
        return (
            f"write `input` as `instruction`{thought}{_also_asked(record, ['input'], ['output'])}"
        )
    parts = [*(key for key in named if named[key] in PARTS), *choices_of(record)]
    parts += [subject] if (subject := _subject_of(record, [*named])) else []
    beside = [f"`{key}`" for key in parts if not _is_shown(record[key], record, asked[:1])]
    question = f"`{asked[0]}`" if asked else ""
    question += f" with {' and '.join(beside)}" * bool(beside)
    likely = _likely_answers(record)
    if _ANSWERS.isdisjoint(named.values()) and not likely:
        likely = [key for key in named if named[key] in _PROGRAMS and _has_words(record[key])]
    if asked and _ANSWERS.isdisjoint(named.values()) and not likely:
        write = f"{question} as `instruction` and what is to be learned as `output`"
        write += _without_thought(record) + _also_thought(record)
        if asked[0] == "prompt":
            joined = _FOR_PLAIN_TEXT if isinstance(record["prompt"], str) else ""
            write = f"what is to be learned as `completion` beside {question}{joined}"
        problem = f"`{asked[0]}` has no answer of a known name beside it"
        return f"{problem}; write {write}, or {_OF_POLICY}"
    answers = likely + [key for key in named if named[key] in _ANSWERS - _OF_PAIRS]
    also = _also_asked(record, asked, [*answers, *parts])
    as_text = _as_text([record[key] for key in answers])
    one_text = "one text of " * (len(answers) == 1 and _are_texts(record[answers[0]]))  # NQ-open's
    answers = [_place_of_answer(key, record[key]) for key in answers]
    said_as_text = one_text + _one_of(answers) + as_text if answers else ""
    if "instruction" in named and "output" not in named and answers:
        return f"write {said_as_text} as `output`"
    if asked[:1] == ["prompt"] and answers:
        as_chat = _FOR_PLAIN_TEXT if isinstance(record["prompt"], str) else ""
        as_chat += _without_thought(record) + _also_thought(record)
        within = f"{' and '.join(beside)} in `prompt` and " * bool(beside)
        return f"write {within}{said_as_text} as `completion`{as_chat}, or {_OF_POLICY}"
    if asked and answers:
        write = f"write {question} as `instruction` and {said_as_text} as `output`"
        write += _without_thought(record) + _also_thought(record) + also
        return f"{write}, or {_OF_POLICY}"
    if answers and not any(_is_text(value) for value in record.values()):  # Countdown's numbers
        return f"it has no question in words; write one as `prompt`, and {_OF_POLICY}"
    if answers and answers[0] not in ("output", "completion"):
        # PRISM's user_prompt and model_response, Amod's Context and Response
        others = [key for key in named if key not in answers and _is_text(record[key])]
        asking = [key for key in others if not words_of(key).isdisjoint(_ASKING)]
        asking = asking or [key for key in others if named[key] in {*PASSAGES, "dialogue"}]
        what = f"what is asked, perhaps `{asking[0]}`," if asking else "what is asked"
        turns = [key for key in named if is_dialogue(record[key]) and key not in answers]
        if turns and role_of(record[turns[0]][-1]) == "user":  # HelpSteer3's `context`
            return f"write `{turns[0]}` as `prompt` and {said_as_text} as `completion`"
        if subject := _subject_of(record, others):
            asking = asking or [key for key in others if not words_of(key).isdisjoint(_OF_TICKETS)]
            asking = [key for key in asking if key != subject and not describes(key, record[key])]
            what = f"what is asked, perhaps `{asking[0]}`," if asking else "what is asked"
            what = f"`{subject}` and {what}"
        elif parts := [
            f"`{key}`"
            for key in others
            if asking
            and key != asking[0]
            and not words_of(key).isdisjoint(PASSAGES)
            and may_be_asked(key, record[key])
            and not _is_shown(record[key], record, asking[:1])
        ]:  # gretel's `sql_context`
            what = f"{what.rstrip(',')} with {' and '.join(parts)},"
        if (source := _source_of(answers, record)) and not asking:
            what = f"what is asked with `{source}`"
        kept = _kept({key: value for key, value in record.items() if key not in answers})
        write = f"{kept}write {what} as `instruction` and {said_as_text} as `output`"
        return (
            write + _without_thought(record) + _also_thought(record)
        )  # CoT-Collection's rationale
    return None


def _remedy_for_issue(record: Mapping[str, Any]) -> str | None:
    """Return the advice for an issue. None: the record is none.

    In Jira's exports ``Summary`` is the title, and each comment a column ``Comment`` with the date,
    the author and the text.
    """
    named = {key.lower(): key for key in record}
    comments = [key for key in record if re.fullmatch(r"comments?\W*\d*", key, re.I)]
    is_issue = any("issue" in words_of(key) for key in record)
    signs = ("description" in named, bool(comments), is_issue)
    if "summary" not in named or sum(signs) < 2:
        return None
    asked = [named[name] for name in ("summary", "description") if name in named]
    asked = [key for key in asked if _is_text(record[key])]
    comments = [key for key in comments if _is_text(record[key])]
    if not comments or not asked:
        return "it is an issue without a comment, which would be its answer; leave such records out"
    return (
        f"write {_all_of(asked)} as `instruction` and the text of {_one_of(comments)}, without its "
        "date and author, as `output`"
    )


_OF_TICKETS = {"ticket", "mail", "email", "customer", "body", "message", "description"}
"""Words in the names of fields of tickets and mails, which have a subject."""


def _subject_of(record: Mapping[str, Any], texts: Sequence[str]) -> str | None:
    """Return the field with the subject of a ticket or a mail, a part of what is asked."""
    if not any(not words_of(key).isdisjoint(_OF_TICKETS) for key in record):
        return None
    named = (key for key in texts if words_of(key) <= {"subject", "line"})
    return next((key for key in named if _is_text(record[key])), None)


_SOURCE_OF = {"target": ("source", "source_text", "source_sentence"), "tgt": ("src",)}
"""For these names of an answer, names of the text that it is made from, such as WMT24++'s."""


def _source_of(answers: Sequence[str], record: Mapping[str, Any]) -> str | None:
    """Return the field with the text that the first of ``answers`` translates, or rewrites."""
    end = next((end for end in _SOURCE_OF if answers[0].lower().startswith(end)), None)
    named = {key.lower(): key for key in record if _has_words(record[key])}
    return next((named[name] for name in _SOURCE_OF.get(end or "", ()) if name in named), None)


def _remedy_for_pointer(record: Mapping[str, Any]) -> str | None:
    """Return the advice for an answer that only points at an option: MMLU's, WinoGrande's."""
    named, asked = _named(record), _asked(record)
    answers = [key for key in named if named[key] in (_ANSWERS | {"answerkey"}) - _OF_PAIRS]
    answers += [key for key in ("label",) if named.get(key) == key]
    found = {key: x for key in answers if (x := pointer_in(record, record[key])) is not None}
    texts = [value for value in record.values() if isinstance(value, str)]
    for key, pointer in found.items():
        if pointer.is_explained([*texts, *pointer.options]):
            continue
        others = [
            name
            for name in named
            if name not in (key, *choices_of(record))
            and _is_text(record[name])
            and (named[name] in PASSAGES or named[name] in _ASKED_BESIDE_OPTIONS)
        ]
        parts = [*asked[:1], *(name for name in others if name not in asked)]
        what = " and ".join(f"`{name}`" for name in parts) or "what is asked"
        write = f"write {what} with {pointer.where} as `instruction`"
        return (
            f"`{key}` seems to be {kind_of([pointer])} {pointer.where}; {write} and the text of "
            f"the option that it names as `output`{_without_thought(record)}"
            f"{_also_thought(record)}, or {_OF_POLICY}"
        )
    return None


def _as_text(values: Sequence[object]) -> str:
    """Return the advice to write answers as texts. Empty: all of them are texts."""
    value = next((value for value in values if isinstance(value, bool | int | float)), None)
    return "" if value is None else f" as a text, such as {example_of_text(value)},"


def _also_asked(record: Mapping[str, Any], asked: Sequence[str], others: Sequence[str]) -> str:
    """Return the advice to leave out what a question may lack: GPQA's `Pre-Revision Question`.

    It is what would be refused beside the question of the first field of ``asked``. The fields
    ``others`` have advice of their own. Empty: there is none.
    """
    thoughts = [key for key in record if thoughts_of_field(key, record[key])]
    fields = [
        key
        for key in record
        if key not in (*asked[:1], *others, *thoughts)
        and may_be_asked(key, record[key])
        and not _is_shown(record[key], record, asked[:1])
    ]
    are = "they are parts" if len(fields) > 1 else "it is a part"
    return f", and leave {_all_of(fields)} out unless {are} of the question" if fields else ""


def _is_shown(value: object, record: Mapping[str, Any], asked: Sequence[str]) -> bool:
    """Return whether the question in one of the fields ``asked`` has the texts of ``value``."""
    shown = [text for key in asked for text in texts_of_part(record[key])]
    texts = texts_of_part(value)
    return bool(texts) and all(is_said(text, shown) for text in texts)


def _likely_answers(record: Mapping[str, Any]) -> list[str]:
    """Return the fields that are likely an answer, by their names or by a thought in their text."""
    return [
        key
        for key, value in _named(record).items()
        if _are_samples(key, record[key])
        or (value not in _ANSWERS and _is_likely_answer(key, record[key]))
    ]


def _is_likely_answer(key: str, value: object) -> bool:
    if not _is_text(value) or thoughts_of_field(key, value) or is_label(value):
        return False
    has_thought = "</think>" in str(value) and words_of(key).isdisjoint(_OF_WRONG)
    return has_thought or _names_answer(key, value)


def _are_samples(key: str, value: object) -> bool:
    """Return whether a field is a list of objects that hold answers, such as natural_reasoning's
    ``responses``."""
    is_named = not words_of(key).isdisjoint(_OF_SAMPLES)
    return _are_objects(value) and is_named and not is_dialogue(value)


def _place_of_answer(key: str, value: object) -> str:
    """Return the place of the answers in the field ``key``. In a list of objects it is a field of
    each, such as natural_reasoning's ``responses[].response``."""
    if isinstance(value, dict) and (place := place_of_answer(value)):  # of a server's response
        return f"{key}{place}" + ".content" * place.endswith(".message")
    first = value[0] if isinstance(value, list) and value else None
    inner = _answer_key(first) if isinstance(first, dict) and not is_dialogue(value) else None
    return f"{key}[].{inner}" if inner else key


def _answer_key(entry: Mapping[str, Any]) -> str | None:
    """Return the field of an object in a list that has a text, or texts, as an answer."""
    found = [
        key
        for key, value in entry.items()
        if (_is_text(value) or (isinstance(value, list) and value and all(map(_is_text, value))))
        and (key.lower() in _ANSWERS - _OF_PAIRS or _names_answer(key, value))
        and not thoughts_of_field(key, value)
    ]
    return next(iter(sorted(found, key=lambda key: key.lower() not in _ANSWERS)), None)


def _question_in(entry: Mapping[str, Any]) -> str | None:
    """Return the field of an object that has a question, which may be an empty text."""
    texts = {key.lower(): key for key, value in entry.items() if isinstance(value, str)}
    return next((texts[name] for name in _ASKED_IN_RECORDS if name in texts), None)


def _remedy_for_records(record: Mapping[str, Any]) -> str | None:
    """Return the advice for a list of questions with their answers, which are records themselves:
    self-instruct's ``instances``, Natural Instructions' ``Instances``."""
    lists = [each for each in _lists_in(record) if _question_in(each.first) and each.answer]
    lists = [each for each in lists if each.name.lower() not in _LISTS_OF_TURNS]
    if not lists:
        return None
    # Natural Instructions has two lists of examples too, which are shorter.
    found = max(
        lists,
        key=lambda each: (
            -len(each.within),
            words_of(each.name).isdisjoint(_OF_EXAMPLES),
            each.length,
        ),
    )
    first, question, answer = found.first, _question_in(found.first) or "", found.answer or ""
    key, names = found.place, {each.name for each in lists}
    shared = [
        f"the `{name}` of {place}"
        for place, outer in found.within
        for name, value in outer.items()
        if name not in names
        and _is_text(value[0] if isinstance(value, list) and len(value) == 1 else value)
        and not words_of(name).isdisjoint(_ASKING | PASSAGES | {"definition"})
        and not describes(name, value)
    ]
    where = " and ".join(shared)
    if not where:
        fields = [f"`{question}` as `instruction`"] * (question != "instruction")
    elif question == "instruction":
        fields = [f"{where} before `instruction`"]
    else:
        fields = [f"{where} as `instruction`", f"`{question}` as `input`"]
    several = "one text of " * isinstance(first[answer.partition("[")[0]], list)
    fields += [f"{several}`{answer}` as `output`"] * bool(several or answer != "output" or where)
    *before, last = fields or [""]
    write = "write each of them as a line" + ", with " * bool(last)
    write += ", ".join(before) + " and " * bool(before) + last
    return (
        f"`{key}` holds records with `{question}` and `{answer}`; {write}, or, if each follows "
        "from those before it, write all as the turns of `messages`"
    )


class _ListOfRecords(NamedTuple):
    """A list of objects in a record."""

    place: str
    """Its place, such as ``data[].paragraphs[].qas``."""
    name: str
    """Its field, the last one of the place."""
    first: dict[str, Any]
    """Its first object."""
    length: int
    within: list[tuple[str, Mapping[str, Any]]]
    """The objects around it, the outer ones first, each behind the words for its place."""

    @property
    def answer(self) -> str | None:
        """The place of the answer in the first object."""
        if (key := _answer_key(self.first)) is not None:
            return key
        named = (key for key in self.first if key.lower() in _SEVERAL)  # SQuAD's `answers`
        places = {key: _place_of_answer(key, self.first[key]) for key in named}
        return next((place for key, place in places.items() if place != key), None)


_DEEPEST = 3
"""Most lists within one another in which records are looked for: SQuAD's."""


def _lists_in(
    record: Mapping[str, Any], place: str = "", within: Sequence[tuple[str, Any]] = ()
) -> Iterator[_ListOfRecords]:
    """Yield the lists of objects in a record, and those in the first object of each."""
    around = [*within, (f"`{place[:-1]}`" if place else "the record", record)]
    for key, value in record.items():
        if not _is_list_of_objects(key, record) or is_dialogue(value):
            continue
        yield _ListOfRecords(place + key, key, value[0], len(value), around)
        if len(around) < _DEEPEST:
            yield from _lists_in(value[0], f"{place}{key}[].", around)


def _remedy_for_rounds(record: Mapping[str, Any]) -> str | None:
    """Return the advice for a list of questions beside one of as many answers: CoQA's."""
    lists = {key: found for key in record if (found := _list_of_texts(key, record[key]))}
    asked = [key for key in lists if key.lower() in _SEVERAL_QUESTIONS]
    said = [
        key
        for key in lists  # QuAC's `orig_answers` have one of the several `answers` to each question
        if key.lower().removeprefix("orig_") in _SEVERAL
        and asked
        and len(lists[key][1]) == len(lists[asked[0]][1]) > 1
    ]
    if not said:
        return None
    passages = [key for key in record if key.lower() in PASSAGES and _is_text(record[key])]
    also = f", with {_all_of(passages)} at the beginning of the first question" * bool(passages)
    question, answer = lists[asked[0]][0], lists[said[0]][0]
    return (
        f"`{asked[0]}` and `{said[0]}` are as many, as the turns of a dialogue; write "
        f"`{question}` as turns of the user and `{answer}` as those of the assistant, one after "
        f"the other, as `messages`{also}"
    )


def _remedy_for_alternatives(record: Mapping[str, Any]) -> str | None:
    """Return the advice for questions, or lists of questions that ask the same, beside their
    answers: Huatuo-26M's."""
    asked = [
        key for key in record if key.lower() in _SEVERAL_QUESTIONS and _texts_in_lists(record[key])
    ]
    said = [key for key in record if key.lower() in _SEVERAL and _texts_in_lists(record[key])]
    if not asked or not said:
        return None
    return (
        f"`{asked[0]}` and `{said[0]}` are lists; write a record for each answer, with it as "
        f"`output` and a text of `{asked[0]}` that it answers as `instruction`"
    )


def _texts_in_lists(value: object) -> bool:
    """Return whether a value is a list of texts, or of such lists."""
    if not isinstance(value, list) or not value:
        return False
    return all(_is_text(each) or _are_texts(each) for each in value)


def _list_of_texts(key: str, value: object) -> tuple[str, list[str]] | None:
    """Return the place of a list of texts, and the texts. None: the field ``key`` holds none.

    It may be a list of objects with a text each, or an object of columns, as tables have it.
    """
    if isinstance(value, list) and _are_texts(value):
        return f"{key}[]", value
    if isinstance(value, list) and _are_objects(value):
        name = next((name for name in _TEXTS_OF_ROUNDS if name in value[0]), None)
        texts = [each.get(name) for each in value]
        return (f"{key}[].{name}", texts) if name and all(map(_is_text, texts)) else None
    if isinstance(value, dict):
        name = next((name for name in _TEXTS_OF_ROUNDS if _are_texts(value.get(name))), None)
        return (f"{key}.{name}[]", value[name]) if name else None
    return None


def _remedy_for_file(record: Mapping[str, Any]) -> str | None:
    """Return the advice for an object that holds the records of a whole file.

    It has them in one list beside fields that describe the file, or each under its id (PubMedQA).
    """
    inner = [*record.values()]
    are_objects = inner and all(isinstance(each, dict) and each for each in inner)
    if are_objects:
        alike = all(not each.keys().isdisjoint(inner[0]) for each in inner)
        is_column = all(key.isdigit() for key in inner[0])
        are_ids = all(re.search(r"\d", key) for key in record)
        is_record = _is_readable(inner[0]) or remedy_for(inner[0]) is not None
        if is_record and alike and (are_ids or (len(record) > 2 and not is_column)):
            key = next(iter(record))
            said = f"its fields, such as `{key}`, seem to be the records; write the value of each "
            return f"{said}as a line{_of_each(inner[0])}"
    lists = [each for each in _lists_in(record) if len(each.within) == 1]
    others = record.keys() - {each.name for each in lists}
    lists = [each for each in lists if each.name.lower() in _HOLDERS]
    if not lists or not all(describes(key, record[key]) for key in others):
        return None
    found = max(lists, key=lambda each: each.length)
    if {"role", "from"} & found.first.keys():
        return None
    said = f"`{found.place}` seems to hold the records; write each of them as a line"
    return said + _of_each(found.first)


def _is_readable(record: Mapping[str, Any]) -> bool:
    """Return whether a record has a field by which a form is recognised."""
    forms = {"messages", "conversations", "text", "instruction", "chosen"}
    return not forms.isdisjoint(record)


def _of_each(record: Mapping[str, Any]) -> str:
    """Return the advice for each record of a file, as the end of a sentence."""
    remedy = None if _is_readable(record) else remedy_for(record)
    return f"; of each, {remedy}" if remedy else ""


def _names_answer(key: str, value: object) -> bool:
    words = words_of(key)
    is_named = not words.isdisjoint(_ANSWERING) and words.isdisjoint(_ASKING | _OF_WRONG)
    return is_named and not describes(key, value)


def _has_words(value: object) -> bool:
    """Return whether a value is a text of several words. One word of ``code`` names a language."""
    return isinstance(value, str) and len(value.split()) > 1


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _remedy_for_turns(record: Mapping[str, Any]) -> str | None:
    """Return the advice for a record with turns that are in no field of a known name."""
    if "role" in record or {"from", "value"} <= record.keys():
        order = order_of_turns(record)
        order += "," * bool(order)
        return (
            f"it is one turn of a dialogue; write the turns of each dialogue{order} as `messages`"
        )
    for key, value in record.items():
        if key in _ANSWERS or (key in _QUESTIONS and not is_dialogue(value)):
            continue
        if is_dialogue(value) and words_of(key).isdisjoint(_OF_EXAMPLES):
            each = "each with `role` and `content`"
            roles = [role_of(turn) for turn in value if isinstance(turn, dict)]
            if "assistant" in roles:
                return f"`{key}` seems to be a dialogue; write its turns as `messages`, {each}"
            others = [role for role in roles if isinstance(role, str) and not is_role(role)]
            if others:
                learned = f"those to be learned, perhaps of {shortened(others[-1])}"
                return (
                    f"`{key}` seems to be a dialogue; write its turns as `messages`, {each}, and "
                    f"`assistant` as the role of {learned}"
                )
            also = "and after them the answer that is to be learned"
            return f"`{key}` seems to be a question; write its turns as `messages`, {each}, {also}"
    if (said := _remedy_for_texts(record)) is not None:
        return said
    lists = [key for key in record if _is_list_of_objects(key, record)]
    for key in sorted(lists, key=lambda key: _unlike_turns(key, record[key])):
        if not describes(key, record[key]):
            return (
                f"if `{key}` is a dialogue, write its turns as `messages`, each with `role` and "
                "`content`; if it holds the records, write each of them as a line"
            )
    return None


def _unlike_turns(key: str, objects: Sequence[Mapping[str, Any]]) -> tuple[bool, bool]:
    """Return a key that sorts a list of objects which may be turns before others.

    Zendesk's tickets have ``comments`` of an author and a body beside ``custom_fields``.
    """
    names = {word for name in objects[0] for word in words_of(name)}
    has_both = not names.isdisjoint(_WHO) and not names.isdisjoint(_WHAT)
    return not words_of(key).isdisjoint(_OF_EXAMPLES), not has_both


def _remedy_for_objects(record: Mapping[str, Any]) -> str | None:
    """Return the advice for a record whose question is an object: Weave's and LangSmith's logs.

    The object holds the messages or the arguments of a call to a model or a program.
    """
    objects = {key: value for key, value in record.items() if isinstance(value, dict)}
    for key, value in objects.items():
        name = next((name for name in _TURNS_IN_OBJECTS if is_dialogue(value.get(name))), None)
        if name is not None:  # NeMo-Gym's `responses_create_params` has tools too
            others = [x for x in record if x != key and not describes(x, record[x])]
            said = [x for x in others if _names_result(x) or x.lower() in _ANSWERS]
            answer = ","
            if said:
                answer = f", perhaps `{_place_of_answer(said[0], record[said[0]])}`,"
                if _are_calls(record[said[0]]):
                    answer = f", perhaps the calls in `{said[0]}` as its `tool_calls`,"
            tools = value.get("tools")
            are_there = isinstance(tools, list) and tools and are_tools(tools)
            also = f" and `{key}.tools` as `tools`" * bool(are_there)
            last = value[name][-1]
            is_whole = isinstance(last, dict) and role_of(last) == "assistant"
            if not are_there and not is_whole and request_in(key, value):
                also = f" and `{key}.tools` as `tools` where a record has them"
            if is_whole:
                return f"write `{key}.{name}` as `messages`{also}"
            return (
                f"write `{key}.{name}` and after it the answer{answer} as `messages`{also}"
                + f", or {_OF_POLICY}" * (not any(map(_names_result, said)))
            )
    for key, value in objects.items():
        texts = [name for name in value if _is_text(value[name])]
        if key.lower() not in ("input", *_QUESTIONS) or not texts:
            continue
        said = [name for name in record if name != key and _names_result(name)]
        answer = "what is to be learned"
        if said:
            answer = "that of " * isinstance(record[said[0]], dict) + f"`{said[0]}`"
        return (
            f"`{key}` is an object; write its text, {_one_of(texts)}, as `instruction` and "
            f"{answer} as `output`" + f", or {_OF_POLICY}" * (not said)
        )
    return None


def _are_calls(value: object) -> bool:
    """Return whether a value is a list of calls, each a name with its arguments."""
    calls = value if isinstance(value, list) and _are_objects(value) else []
    return bool(calls) and all({"name", "arguments"} <= call.keys() for call in calls)


def _names_result(key: str) -> bool:
    return not words_of(key).isdisjoint({*_ANSWERING, *_OF_SAMPLES})


def _remedy_for_texts(record: Mapping[str, Any]) -> str | None:
    """Return the advice for a dialogue without roles in a field of :data:`_LISTS_OF_TEXTS`."""
    for key, value in record.items():
        inner = value.values() if isinstance(value, dict) else value
        inner = list(inner) if isinstance(value, list | dict) else []
        are_texts = all(isinstance(text, str) for text in inner)
        are_turns = all(
            isinstance(turn, dict) and any(map(_is_text, turn.values())) for turn in inner
        )
        is_long = len(inner) > 1 or (isinstance(value, dict) and are_turns)
        if (are_texts or are_turns) and inner and is_long and key.lower() in _LISTS_OF_TEXTS:
            first = inner[0] if are_turns else {}
            numbers = (
                x for x in first if type(first[x]) is int and not _WHO.isdisjoint(words_of(x))
            )
            who = next(numbers, None)
            each = "each with its role"
            each += f", user or assistant in place of the numbers of `{who}`" * bool(who)
            return f"`{key}` seems to be a dialogue; write its texts as `messages`, {each}"
    return _remedy_for_pairs_of_texts(record)


def _remedy_for_pairs_of_texts(record: Mapping[str, Any]) -> str | None:
    """Return the advice for lists of questions, each in a list with its answer: Indic-Align has one
    for each language."""
    names = [
        key
        for key, value in record.items()
        if isinstance(value, list) and value and all(map(_is_pair_of_texts, value))
    ]
    if not names or not {"instruction", "prompt"}.isdisjoint(record):
        return None
    seem, write = f"`{names[0]}` seems to be a dialogue", "write its texts as `messages`"
    if len(names) > 1:
        seem = f"{_all_of(names)} seem to be dialogues"
        write = "write each as a record of its own, its texts as `messages`"
    return (
        f"{seem} of questions, each in a list with its answer; {write}, of user and assistant "
        + ("in turn")
    )


def _is_pair_of_texts(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_text, value))


_TEXT_OF_LANGUAGE = re.compile(r"(\w+_)?[a-z]{2,3}_[A-Z][a-z]{3}|(\w+_)[a-z]{2}")
"""Matches names of a text with the code of its language: ``sentence_eng_Latn`` (FLORES)."""
_OF_PASSAGES = {"context", "passage", "background", "story", "title"}
"""Words in the names of texts that a question may be about, and that are no answer."""
_OF_CHANGES = {"patch", "diff"}
_ON_CHANGES = {"msg", "message", "comment", "review", "commit_message"}
"""Names of a change to a program, and of what is said about it: CodeReviewer's."""


def remedy_for_columns(record: Mapping[str, Any]) -> str | None:
    """Return the advice for a record with texts of unknown names, perhaps in another language.

    None: it has less than two texts of several words that may be a question and its answer.
    """
    texts = [key for key in record if _is_wordy(record[key]) and not describes(key, record[key])]
    if len(texts) < 2:
        return None
    change = next((key for key in texts if key.lower() in _OF_CHANGES), None)
    said = next((key for key in texts if key.lower() in _ON_CHANGES), None)
    if change and said:
        others = [key for key in texts if key not in (change, said)]
        asked = f"`{change}`" + f" with {_all_of(others)}" * bool(others)
        return f"write {asked} as `instruction` and `{said}` as `output`"
    answers = [key for key in texts if not _names_passage(key)]
    if not answers:
        return None
    languages = [_TEXT_OF_LANGUAGE.fullmatch(key) for key in texts]
    if len({found and (found[1] or found[2]) for found in languages}) == 1 and all(languages):
        return (
            f"{_all_of(texts)} seem to be one text in several languages; write what is asked, with "
            "one of them, as `instruction` and another as `output`"
        )
    if len(texts) == 2:
        first = next(key for key in texts if key != answers[-1])
        return (
            f"if `{first}` is what is asked and `{answers[-1]}` the answer, rename them "
            "`instruction` and `output`"
        )
    return (
        f"write what is asked as `instruction` and what is learned, {_one_of(answers)}, as `output`"
    )


def _names_passage(key: str) -> bool:
    """Return whether a name is that of a text which a question may be about, or of its title."""
    return key.lower() in PASSAGES or not words_of(key).isdisjoint(_OF_PASSAGES)


def _is_wordy(value: object) -> bool:
    """Return whether a value is a text of several words, or a longer one of a script without
    spaces."""
    return _has_words(value) or (isinstance(value, str) and len(value) > 5 and not value.isascii())


def _remedy_for_thoughts(record: Mapping[str, Any]) -> str | None:
    """Return the advice for a record with a thought, and no question of a known name."""
    thought = next((key for key in record if thoughts_of_field(key, record[key])), None)
    if thought is None:
        return None
    return (
        f"`{thought}` may be the thought of an answer; write the question and the answer as "
        "`messages`, and the thought as `reasoning_content` of the answer"
    )


def _also_thought(record: Mapping[str, Any]) -> str:
    """Return the advice to write a record's thoughts beside its answer. Empty: it has none."""
    thoughts = [key for key in record if thoughts_of_field(key, record[key])]
    if not thoughts:
        return ""
    lists = [key for key in thoughts if not isinstance(record[key], str)]
    thought = "the text in " * bool(lists)
    thought += f"{_one_of(thoughts)} as `reasoning_content` of the answer"
    thought += ", and leave the others out" * (len(thoughts) > 1)
    return f", or write both as `messages` with {thought}"


def _without_thought(record: Mapping[str, Any]) -> str:
    """Return the advice to leave out the thoughts of a record. Empty: it has none."""
    thoughts = [key for key in record if thoughts_of_field(key, record[key])]
    return f", without {_all_of(thoughts)}" if thoughts else ""


def _named(record: Mapping[str, Any]) -> dict[str, str]:
    """Return the name of each field in lower case.

    Fields that are null, and P3's lists of token ids, are left out.
    """
    return {
        key: key.lower()
        for key, value in record.items()
        if value is not None
        and not (isinstance(value, list) and value and isinstance(value[0], int))
    }


def _asked(record: Mapping[str, Any]) -> list[str]:
    """Return the fields that may be a question, the likeliest first."""
    named = _named(record)
    has_objects = any(_is_list_of_objects(key, record) for key in record)
    return [
        key
        for name in _QUESTIONS
        for key in named
        # DialogStudio's `prompt` lists texts that describe the task of the dialogue in `log`.
        if named[key] == name and not (has_objects and _are_texts(record[key]))
    ]


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(text, str) for text in value)


def _is_list_of_objects(key: str, record: Mapping[str, Any]) -> bool:
    """Return whether the field ``key`` is a list of objects that are no tools."""
    value = record[key]
    if not _are_objects(value):
        return False
    # CoQA's records have a `name`, as tools do.
    are_named = are_tools(value) and not words_of(key).isdisjoint(_OF_TOOLS)
    return not are_named and not names_of_tools(value)


def _are_objects(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(x, dict) for x in value)


def _asks(record: Mapping[str, Any]) -> bool:
    """Return whether a record has a question, and no answer under a name that is read."""
    given = {key for key, value in record.items() if value}
    if given & {"completion", "output", "chosen", "rejected", "text"}:
        return False
    for key in ("messages", "conversations"):
        turns: Any = record.get(key)
        if is_dialogue(turns):
            return isinstance(turns[-1], dict) and role_of(turns[-1]) == "user"
    return not given.isdisjoint((*_QUESTIONS, "instruction"))


def _all_of(names: list[str]) -> str:
    return " and ".join(f"`{name}`" for name in names)


def _one_of(names: list[str]) -> str:
    return _all_of(names) if len(names) == 1 else f"one of {_all_of(names)}"


def _for_chat(record: Mapping[str, Any]) -> str:
    """Return the advice to make a chat of a prompt and two answers.

    Answers to a text in ``prompt`` would be joined to it as plain text. Empty: they become a chat.
    """
    asked = record.get("prompt")
    if isinstance(asked, str) and not asked.lstrip().startswith("["):  # Arena's lists are turns
        return "; answers are joined to `prompt` as plain text: rename it `question` for a chat"
    turns = record.get(_other_question(record) or "")
    is_chat = not _also_prompt(record) or isinstance(turns, list)  # HelpSteer3's `context`
    return "" if is_chat else ", or as `question` for a chat"


def _also_original(record: Mapping[str, Any]) -> str:
    """Return the advice to write the question that two answers have in their names.

    Preference-Collection has ``orig_instruction`` beside ``orig_response_A`` and
    ``orig_response_B``, and in ``instruction`` what a judge is asked. Empty: there is none.
    """
    answer = next((key for key in record if _OF_TWO.fullmatch(key)), "")
    begin = re.fullmatch(r"(\w+_)[a-z]+_[012ab]", answer, re.I)
    begins = [begin[1]] if begin else []
    names = [f"{begin}{name}" for begin in begins for name in (*_QUESTIONS_OF_PAIRS, *_QUESTIONS)]
    name = next((name for name in names if _is_text(record.get(name))), None)
    if name is None:
        return ""
    others = [f"`{key}`" for key in _QUESTIONS_OF_PAIRS if record.get(key) is not None]
    return f", and `{name}` as `question`" + f" in place of {' and '.join(others)}" * bool(others)


def _also_prompt(record: Mapping[str, Any]) -> str:
    """Return the advice for the question of two answers. Empty: the question is read as it is."""
    known = (*_QUESTIONS_OF_PAIRS, "messages", "conversations")
    if any(isinstance(record.get(key), str | list) for key in known):
        return ""
    if any(is_dialogue(value) for key, value in record.items() if _OF_TWO.fullmatch(key)):
        return ""  # whole dialogues begin with their question
    if (key := _other_question(record)) is not None:
        return f", and `{key}` as `prompt`"
    where = "the text of `question`" if record.get("question") is not None else "what is asked"
    return f", and {where} as `prompt`"


def _other_question(record: Mapping[str, Any]) -> str | None:
    """Return the field of a question of two answers that has another name, if any."""
    names = ("context", "query", "problem")
    return next((key for key in names if record.get(key) is not None), None)
