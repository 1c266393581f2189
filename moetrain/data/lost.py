"""Refuses a record if a field beside its answer would be lost, or says that the answer is bad.

A field is lost if none of the record's documents shows its text. It may be a thought, a passage
that the question is about, the choices of a question, a system text, the tools, or a picture. The
names of such fields are those of public data sets, in lower case.

Other names are judged by their words: ``synthetic_reasoning`` is a thought, and
``reasoning_effort`` describes one. Left out on purpose: fields beside a text that is a whole
document by itself, except pictures whose mark is in the text.
"""

import ast
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from moetrain.config.sources import shortened
from moetrain.data.characters import HALF
from moetrain.data.documents import Document
from moetrain.data.messages import (
    ABOUT_TURNS,
    REASONING,
    THOUGHTS,
    BadLineError,
    is_dialogue,
    is_message,
    is_role,
    is_said,
    lost_media,
    media_of,
    role_of,
    says_what_is_learned,
    text_of,
    thoughts_in,
    truth_of,
    turns_in,
    value_in,
    words_of,
)
from moetrain.data.options import Pointer, choices_of, listed, pointer_in
from moetrain.data.tools import names_of_tools, read_tools
from moetrain.data.warned import warn_once

_THOUGHTS = {
    *(*REASONING, *THOUGHTS, "reasoning_trace", "complex_cot", "rationale", "deepseek_reasoning"),
    *("thinking_trajectory", "thinking_trajectories"),
    *("deepseek_thinking_trajectory", "gemini_thinking_trajectory"),
}
"""Names of a thought beside an answer: those of medical-o1, s1K, OpenThoughts and others."""
_OF_THOUGHTS = {
    *("reasoning", "thinking", "think", "thought", "thoughts", "cot", "rationale", "scratchpad"),
    *("monologue", "deepthink"),
}
"""Words in the names of a thought, such as GeneralThought's ``model_reasoning``."""
_MODES = {"on", "off", "true", "false", "yes", "no", "none", "minimal", "low", "medium", "high"}
"""Values of such fields that are not thoughts: Nemotron's ``reasoning`` is on or off."""
PASSAGES = {
    *("context", "contexts", "ctx", "passage", "passages", "paragraph", "paragraphs"),
    *("document", "article", "background", "evidence", "story", "support"),
    *("schema", "db_schema", "database_schema", "table_schema"),  # a question for SQL
    *("attachment", "attachments", "extracted_content", "extracted_text", "file_content"),
}
"""Names of texts that a question may be about."""
PARTS = PASSAGES | {"table", "premise", "hypothesis"}
"""Names of texts that may be a part of the question, beside its choices."""
_OF_ADDRESSES = {"id", "file", "filename", "path", "url"}
"""Words in the keys of an object with the place or the number of what its other keys hold."""
_FILE = re.compile(
    r"[^\n]*\.(?:csv|tsv|jsonl?|txt|md|html?|xml|pdf|docx?|xlsx?|parquet)", re.IGNORECASE
)
"""Matches the name of a file: ``csv/204-csv/590.csv`` in WikiTableQuestions' ``table``."""
_ASKED = {
    *("question", "query", "instruction", "prompt", "problem", "input", "text", "suffix", "code"),
    *("user_prompt", "user_query", "problem_statement", "problem_description", "dialogue"),
    *("dialog", "table", "premise", "hypothesis", "hint", "hints", "knowledge", "facts"),
    *("definition", "references", "search_results", "few_shot", "ctxs", "chat_history"),
    *("previous_turns", "user_info", "profile", "task_description", "inputs", "input_text"),
    *("content", "sentence", "sentences"),
}
"""Names of texts that may be a part of what is asked, beside an instruction or a prompt."""
_ASKED_BESIDE_TURNS = {"question", "query", "instruction", "prompt", "problem", "input"}
"""Names of texts that may be a part of what is asked beside a dialogue. Fields with other names
describe the dialogue, as Magpie's ``knowledge`` does."""
_OF_PASSAGES = {"context", "contexts", "passage", "passages", "question", "query", "instruction"}
"""Words in the names of texts that may be a part of what is asked: ``retrieved_contexts``."""
_ANSWERS_OF = {
    "alpaca": {"output", "history"},
    "completion": {"completion"},
    "preference": {"chosen", "rejected"},
}
"""Fields with answers that a form reads itself."""
_BY_ALL = {"messages", "conversations", "system", "tools"}
"""Fields that are read, or compared with what is read, in all forms."""
_OF_NUMBERS = {"label", "kto_tag", "margin"}
"""Fields, beside masks and weights, whose numbers and truth values are read. In CSV these are
texts."""
_READ = {"alpaca": {"instruction", "input"}, "completion": {"prompt"}}
"""Fields of what is asked that a form reads itself, whatever their type."""
_DESCRIBES = {
    *("id", "ids", "idx", "index", "type", "kind", "source", "lang", "language", "category"),
    *("topic", "tag", "tags", "name", "url", "license", "version", "date", "time", "split"),
    *("dataset", "provider", "difficulty", "level", "domain", "length", "tokens"),
    *("token", "count", "num", "number", "score", "scores", "rating", "hash", "key", "format"),
    *("status", "template", "quality", "effort", "mode", "budget", "style", "complexity", "field"),
    *("path", "is", "has", "enable", "metadata", "meta", "title", "qtype", "script", "subset"),
    *("author", "year", "timestamp", "origin", "task", "unnamed", "generator"),
    *("uuid", "created", "updated", "filename"),
}
"""Words that tell that a field describes the record, whatever other words its name has."""
_AFTER_TURNS = {
    *("answer", "answers", "response", "responses", "output", "completion", "completions"),
    *("target", "targets", "solution", "reply", "ground_truth", "reference"),
}
"""Names of the answer to the last question of a dialogue, such as ChatQA's ``answers``."""
_OF_CHECKS = {
    *("func_name", "fn_name", "instruction_id", "instruction_id_list", "instruction_ids"),
    *("tests", "test_cases", "unit_tests", "test_list"),
}
"""Keys of an object that says how a program checks an answer."""
_VARIANTS = {"original", "orig", "rewritten", "evolved", "seed", "explanation"}
"""Words in the names of texts that a record was made from, or that explain it."""
_OF_ATTACHMENTS = {"attachment", "attachments", "upload", "uploads"}
_OF_FILES = _OF_ATTACHMENTS | {"file", "files", "document", "documents", "doc", "docs"}
"""Words in the keys of a turn with files that it comes with: Claude.ai's ``attachments``."""
_OF_SOURCES = {
    *("extracted", "quoted", "quote", "quotes", "cited", "citation", "citations", "reference"),
    *("references", "retrieved", "retrieval", "search", "snippet", "snippets", "excerpt"),
    *("excerpts", "sources", "grounding", "knowledge", "context", "contexts", "passage"),
    *("passages", "evidence"),
}
"""Words in the keys of a turn with texts that it is about, or that it has its facts from: Open
WebUI's ``sources``, Anthropic's ``citations``."""
_OF_RIGHT = {"reference", "references", "ground", "gold", "golden", "expected", "correct", "target"}
_OF_RIGHT_ANSWERS = {
    *("answer", "answers", "solution", "solutions", "output", "response", "completion", "truth"),
}
"""Words of which a name has one each if it holds a right answer, with which others compare that of
a turn: AM-DeepSeek-R1-Distilled's ``reference_answer``. It is no part of what is asked."""
_FEWEST_WORDS = 4
"""Fewest words of a text in a turn that is named if nothing shows it. Shorter ones, such as
WildChat's ``country``, describe the turn."""
_FEWEST_WORDS_OF_SOURCE = 6
"""Fewest words of a text in a ``source`` that is no name of a data set, a site or a book."""
_OF_OTHER_TOOLS = {"target"}
"""Words in the names of tools that were taken out of a record on purpose: When2Call's."""
_OF_ENVELOPES = ("assistant", "finish_reason", "candidates", "status_code")
"""Words in the text of a server's response."""
_SYSTEMS = {
    *("sys", "custom_system_prompt", "sys_prompt", "instructions", "preamble", "developer"),
    "developer_prompt",
}
"""Names that a system text may have."""
_BESIDE_SYSTEM = {"prompt", "message", "instruction", "instructions", "msg", "text", "content"}
"""Words beside "system" in such names, as in Gemini's ``systemInstruction``."""
_PLAYED = {"persona", "character_card", "scenario"}
"""Names of texts that say whom the assistant plays. Beside a dialogue they describe it."""
_FUNCTIONS = {
    *("available_tools", "function_list", "function_description", "toolconfig", "tool_config"),
    *("tool_definitions", "tool_list", "tool_schemas", "tools_json", "apis", "api_list"),
}
"""Names that the tools may have, such as Bedrock's ``toolConfig``."""
_IDS_OF_DIALOGUES = [
    *(frozenset({x, "id"}) for x in ("dialogue", "dialog", "conversation", "conv", "session")),
    frozenset({"thread", "id"}),
    frozenset({"thread", "ts"}),
]
"""The words in names of the number of a conversation, such as Claude Code's ``sessionId`` and
Slack's ``thread_ts``."""
_OF_PARENTS = {"parent", "id", "uuid", "message", "turn", "comment", "post", "tweet"}
"""Words in the name of a field with the id of the turn before a turn, one of them parent."""
_OF_PERSONS = {"user", "name", "author", "screen"}
"""Words in the name of a field with whom a turn replies to, and not with the turn itself."""
_OF_NOTES = {"is", "jsd", "comment", "message", "note", "post", "reply", "turn"}
_HIDDEN = ({"private"}, {"internal"}, {"confidential"}, {"hidden"})
"""The words, but for some of ``_OF_NOTES``, in the names of keys that are true of a turn which only
one side of a dialogue sees. ``public`` (Jira's ``jsdPublic``) is false of it."""
_IDS_OF_TURNS = [
    *(frozenset({x, y}) for x in ("turn", "response", "utterance") for y in ("id", "idx")),
    frozenset({"ts"}),
]
"""The words in names of the number of a turn in its conversation, such as Slack's ``ts``."""
_OF_BEFORE = {"prev", "previous", "prior", "earlier", "past", "history", "context"}
"""Words in the names of turns that come before those of a record, such as GeneralThought's
``prev_messages``."""
_OF_TURNS = {
    *("role", "from", "content", "value", "tool_calls", "function_call"),
    *(*REASONING, *THOUGHTS, *ABOUT_TURNS),
}
"""Keys of a turn that are read, that are compared with what is read, or that describe it."""
_OF_ANSWER = {"content", "parts", "text", "tool_calls", *REASONING, *THOUGHTS}
"""Keys of a server's message that hold what it says."""
_TEXTS = PASSAGES | _SYSTEMS | _FUNCTIONS
"""Names of further fields whose texts must be in a document, beside thoughts and choices."""
_MARK = re.compile(r"<(?:image|img|video|audio)>", re.I)
"""Matches the mark in a text that stands for a picture, a film or a sound."""
_MARK_OF_TURN = re.compile(r"\A\s*<(?:image|video|audio)>\s*\n|\n\s*<(?:image|video|audio)>\s*\Z")
"""Matches such a mark on a line of its own, the first or the last of a turn, as in LLaVA's records.
Elsewhere it may be HTML."""

_OF_VERDICTS = {
    *("is", "if", "was", "the", "response", "answer", "completion", "output"),
    *("source", "target", "translation", "segment", "sample", "example", "record", "row"),
}
"""Words that may stand beside a word of :data:`_GOOD` or :data:`_BAD` in the name of a verdict:
WMT24++'s ``is_bad_source``."""
_ENDS = {"resolved", "success", "successful", "solved"}
"""Words for a run that succeeded: SWE-Gym's. Their values may be the numbers 0 and 1."""
_GOOD = {
    *("safe", "correct", "helpful", "harmless", "acceptable", "approved", "valid", "passed"),
    *("verified", "good", "unharmful", "chosen", "accepted", *_ENDS),
}
_BAD = {"unsafe", "incorrect", "harmful", "wrong", "failed", "toxic", "bad", "hallucination"}
_ANNOTATED = {"accept": True, "reject": False, "ignore": False}
"""What annotators say of an answer, and whether it is to be learned: Prodigy's ``answer``."""
_OF_ANSWERS = {"response", "answer", "completion", "output", "assistant"}
_JUDGING = {
    *("label", "labels", "harm", "safety", "verdict", "judgement", "judgment", "quality", "rating"),
    *("correctness", "toxicity", "evaluation", "score", "class", "harmfulness", "helpfulness"),
}
"""Words in the names of fields that judge an answer: WildGuard's ``response_harm_label``, Aegis'
``response_label``."""
_OF_PROMPTS = {"prompt", "question", "query", "user", "input", "instruction", "adversarial"}
"""Words in the names of fields that judge what is asked."""
_OF_SCORES = {
    *("score", "scores", "quality", "reward", "rating", "correctness", "coherence", "toxicity"),
    *("helpfulness", "harmlessness", "harmfulness"),
}
"""Words in the names of scores of an answer: HelpSteer's, UltraFeedback's, OpenCodeInstruct's
``average_test_score``, toxic-chat's."""
_OF_NO_SCORES = _OF_PROMPTS | {"difficulty", "rejected"}
"""Words in the names of scores of something else, such as UltraFeedback's ``score_rejected``."""
_TRUTHS = {"ground_truth", "answer", "target", "solution"}
"""Names in an object whose number is a right answer: that of verl's ``reward_model``."""
_SCORES_OF_PAIRS = ("score_{}", "{}_score", "rating_{}", "{}_rating", "{}_avg_rating")
"""Names of the scores of both answers of a pair, beside ``chosen`` and ``rejected``."""

_OF_FEEDBACK = {
    *("feedback", "rating", "vote", "votes", "thumb", "thumbs", "reaction", "reactions"),
}
"""Words in the names of what users say of an answer, such as ``user_feedback``."""
_OF_LABELS = {"label", "kto_tag"}
_LIKED = {
    *("thumbs up", "thumb up", "thumbsup", "up", "upvote", "upvoted", "like", "liked"),
    *("positive", "\N{THUMBS UP SIGN}"),
}
_DISLIKED = {
    *("thumbs down", "thumb down", "thumbsdown", "down", "downvote", "downvoted", "dislike"),
    *("disliked", "negative", "\N{THUMBS DOWN SIGN}"),
}
"""The words in which users judge an answer, in the spelling that :func:`liking_of` gives them."""
_OF_SHADES = re.compile("[\ufe0f\U0001f3fb-\U0001f3ff:]")
"""Matches the colour of an emoji, and the colons around its name."""

_TIE = re.compile(
    r"(?:tied?|draw)(?: \([\w ]+\))?|(?:tie[ _-]?)?both[ _-]?(?:are[ _-]?)?(?:bad|good)", re.I
)
"""Matches the words that neither of two answers is better: Arena's ``tie (bothbad)`` and
``both_bad``."""
_OF_REQUESTS = {"messages", "contents", "model"}
"""Keys of the body of a request to a server, of which one is there."""
_OF_PAIRS = {"prompt", "question", "instruction", "input", "chosen", "rejected", "system"}
"""Fields of pairs that are read."""


def refuse_lost(record: Mapping[str, Any], documents: Sequence[Document], form: str) -> None:
    """Raise BadLineError if a field beside the answer would be lost.

    Args:
        record: the record, whose fields have been renamed to those of the forms.
        documents: the documents of the record. It may have none: then nothing is refused.
        form: the form of the record.
    """
    if not documents:
        return
    key = media_of(record)
    # A text is whole by itself, unless it has a mark in the place of the picture.
    is_needed = form != "text" or any(_MARK.search(document.text) for document in documents)
    if key is not None and is_needed:
        raise lost_media(f"`{key}`", record[key])
    if form == "text":
        return
    if form == "alpaca":
        _refuse_empty_question(record)
    for name in ("messages", "conversations"):
        _refuse_marks(record.get(name), name)
    _refuse_lost_request(record, documents)
    choices = choices_of(record) if form != "preference" else []  # those of a pair are its answers
    if form != "preference":
        _refuse_pointer(record, form)
    whole = [document.text for document in documents]
    given = [document.text[: _begin_of_answer(document)] for document in documents]
    for key, value in record.items():
        texts = _texts_to_show(key, value, record, form, choices)
        # A call in an answer has the name of its tool, and does not declare it.
        shown = given if texts and texts == names_of_tools(value) else whole
        lost = [text for text in texts if not is_said(text, shown)]
        is_chosen = len(lost) < len(texts) and all("</think>" in text for text in texts)
        if lost and not is_chosen:  # in OpenR1's `generations`, the answer is one of the texts
            # Among the texts of objects the longest: others may be the address of a passage.
            are_texts = isinstance(value, list) and all(isinstance(text, str) for text in value)
            text = lost[0] if are_texts else max(lost, key=len)
            raise BadLineError(_problem(key, value, text, record, form))


def request_in(key: str, value: object) -> tuple[str, Mapping[str, Any]] | None:
    """Return the place and the body of a request to a server in the field ``key``, as logs have it.

    None: the field holds no request.
    """
    # Other texts of JSON, which may be large, are not parsed.
    may_be = not isinstance(value, str) or any(f'"{name}"' in value for name in _OF_REQUESTS)
    request = _parsed(value) if may_be else None
    if isinstance(request, Mapping) and isinstance(request.get("body"), Mapping):
        key, request = f"{key}.body", request["body"]
    if not isinstance(request, Mapping) or _OF_REQUESTS.isdisjoint(request):
        return None
    return key, request


def systems_of_request(request: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts for the system in the body of a request, by their places in it."""
    found: dict[str, str] = {}
    for key, value in request.items():
        if key == "system" or is_system(key):
            parts = value.get("parts") if isinstance(value, Mapping) else value  # Gemini's
            found[key] = text_of({"content": parts})
    turns = request.get("messages")
    for i, turn in enumerate(turns if isinstance(turns, list) else ()):
        if isinstance(turn, Mapping) and role_of(turn) == "system":
            found[f"messages[{i}]"] = text_of(turn)
    return {place: text for place, text in found.items() if text.strip()}


def _refuse_lost_request(record: Mapping[str, Any], documents: Sequence[Document]) -> None:
    """Raise BadLineError if the system's text or the tools of a request would be lost.

    They are in an object beside the answer: the request itself, or what a log keeps of it
    (LiteLLM's ``optional_params``).
    """
    for key, value in record.items():
        if (found := request_in(key, value)) is None:
            continue
        place, request = found
        for inner, text in systems_of_request(request).items():
            if not is_said(text, (document.text for document in documents)):
                said = (
                    f"`{place}.{inner}` is the system's text and would be lost: {shortened(text)}"
                )
                raise BadLineError(f"{said}; write it as `system`, or leave `{key}` out")
    if record.get("tools") or record.get("functions"):
        return
    given = [document.text[: _begin_of_answer(document)] for document in documents]
    for key, value in record.items():
        if key in _BY_ALL or key.lower() in _FUNCTIONS:  # they are refused as tools themselves
            continue
        if not words_of(key).isdisjoint(_VARIANTS | _OF_OTHER_TOOLS):
            continue
        for place, tools in _tools_within(key, value):
            lost = [tool for tool in tools if not _is_tool_said(tool, given)]
            if lost:
                raise BadLineError(
                    f"`{place}` are the tools of the request and would be lost: "
                    f"{shortened(lost[0]['name'])}; write them as `tools`, or leave `{key}` out",
                    kind=f"`{place}` would be lost",
                )


def _begin_of_answer(document: Document) -> int:
    """Return the number of characters before the first one that is learned."""
    spans = document.loss_spans
    return min((start for start, _ in spans or ()), default=len(document.text))


_TOOLS_WITHIN = ("tools", "functions", "toolConfig", "tool_config")
"""Keys of the tools in a request to a server: OpenAI's two, and Bedrock's."""


def _tools_within(
    key: str, value: object, depth: int = 2
) -> Iterator[tuple[str, Sequence[Mapping[str, Any]]]]:
    """Yield each list of tools in an object, or in the objects within it, with its place.

    ``value`` is what the field ``key`` holds, perhaps as the text of its JSON. The tools are
    functions with a name.
    """
    if isinstance(value, str) and any(f'"{name}"' in value for name in _TOOLS_WITHIN):
        value = _parsed(value)
    if not isinstance(value, Mapping):
        return
    for name, inner in value.items():
        if name in _TOOLS_WITHIN:
            place, tools = f"{key}.{name}", _parsed(inner)
            if isinstance(tools, Mapping):
                place, tools = f"{place}.tools", tools.get("tools")
            entries = [_parsed(tool) for tool in tools] if isinstance(tools, list) else []
            tools = read_tools([tool for tool in entries if isinstance(tool, dict)])
            functions = [tool.get("function") for tool in tools]
            functions = [
                x for x in functions if isinstance(x, dict) and any(_texts_in(x.get("name")))
            ]
            if functions:
                yield place, functions
        elif depth > 1:
            yield from _tools_within(f"{key}.{name}", inner, depth - 1)


def _is_tool_said(tool: Mapping[str, Any], given: Sequence[str]) -> bool:
    """Return whether one of the texts ``given`` has the name of a tool and its description."""
    parts = [*_texts_in([tool["name"], tool.get("description")])]
    return any(
        all(is_said(text, [shown]) or is_said(json.dumps(text)[1:-1], [shown]) for text in parts)
        for shown in given
    )


_ANSWER_IN = {"alpaca": "output", "completion": "completion"}
"""The field with the answer of a form."""


def _refuse_pointer(record: Mapping[str, Any], form: str) -> None:
    """Raise BadLineError if the answer only points at an option that the question neither numbers
    nor letters, such as the 2 of WinoGrande's ``answer``."""
    turns = _turns_of(record, "messages") or _turns_of(record, "conversations")
    if (name := _ANSWER_IN.get(form)) is not None:
        answer = record.get(name)
        asked = [record.get(key) for key in ("system", "instruction", "input", "prompt", "history")]
    else:
        last = turns[-1] if turns and role_of(turns[-1]) == "assistant" else {}
        answer = last.get("content", last.get("value"))
        asked = [record.get("system"), *turns[:-1]]
    found = pointer_in(record, answer)
    shown = [*_texts_in(asked)]
    if found is None or found.is_explained(shown):
        return
    write = "write the text of that option as the answer"
    if not all(is_said(text, shown) for text in found.options):
        write += ", and the options in the question"
    raise BadLineError(
        f"the answer {shortened(answer)} only points at an option of {found.where}, and the "
        f"question does not say at which: {_meaning(found)}; {write}, or leave {found.where} out "
        "if the question says what the answer means",
        kind=f"the answer only points at an option of {found.where}",
    )


def _meaning(found: Pointer) -> str:
    """Describe the option at which an answer points, for an error."""
    if not found.by_begin:
        return f"it is {shortened(found.text)}"
    ways = [f"as an index from {x} it is {shortened(text)}" for x, text in found.by_begin.items()]
    alone = ", and this answer alone does not show where the index begins" * (len(ways) > 1)
    return ", ".join(ways) + alone


def _refuse_empty_question(record: Mapping[str, Any]) -> None:
    """Raise BadLineError if a question has neither a letter nor a digit, such as the "-" of
    OpenCodeReasoning, whose questions lie in another data set."""
    fields = [key for key in ("instruction", "input") if isinstance(record.get(key), str)]
    text = "".join(record[key] for key in fields).strip()
    if text and text.isascii() and not any(character.isalnum() for character in text):
        name = next(key for key in fields if record[key].strip())
        raise BadLineError(
            f"`{name}` is {text!r}, which asks nothing; write the question there, or leave such "
            "records out (data.bad_records skip)"
        )


def unread_fields(record: Mapping[str, Any], documents: Sequence[Document], form: str) -> list[str]:
    """Return the fields with texts that no document shows, except those that describe the record.

    The arguments are those of :func:`refuse_lost`.
    """
    read = _BY_ALL | _READ.get(form, set()) | _ANSWERS_OF.get(form, set())
    shown = _Shown(document.text for document in documents)
    fields = [
        place
        for key, value in record.items()
        if key not in read
        and (not describes(key, value) or is_source_text(key, value))
        and not (_is_of_numbers(key) and not isinstance(value_in(value), str))
        and not is_feedback(key, value)
        for place in _unread_places(key, listed(_parsed(value)), shown)
    ]
    of_turns = (key for name in record if name in read for key in _unread_keys(name, record, shown))
    return [*fields, *dict.fromkeys(of_turns)]


class _Shown:
    """The texts that a model is shown, whatever their white space."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = [" ".join(text.split()) for text in texts]

    def all_of(self, texts: Iterable[str]) -> bool:
        """Return whether each of ``texts`` is a part of a text that is shown."""
        return all(self._has(" ".join(HALF.sub("\ufffd", text).split())) for text in texts)

    def _has(self, words: str) -> bool:
        return any(words in text for text in self._texts)


def _unread_places(key: str, value: object, shown: _Shown) -> list[str]:
    """Return the places in the field ``key`` whose texts are not shown: the field itself, or some
    keys of its object, such as the ``metadata.note`` of a request whose turns are shown.

    Of what a server answers, only the messages count.
    """
    if place_of_answer(value) is not None:
        value = [
            {name: _parsed_calls(each[name]) for name in each.keys() & _OF_ANSWER}
            for _, each in _objects_in(value)
            if _is_answer(each)
        ]
    if shown.all_of(_own_texts(value)):
        return []
    if not isinstance(value, Mapping):
        return [key]
    inner = [name for name, each in value.items() if not shown.all_of(_own_texts({name: each}))]
    return [f"{key}.{name}" for name in inner] if len(inner) < len(value) else [key]


def _parsed_calls(value: object) -> object:
    """Return what an answer holds, with the ``arguments`` of its calls as objects."""
    if isinstance(value, Mapping):
        return {
            key: _parsed(each) if key == "arguments" else _parsed_calls(each)
            for key, each in value.items()
        }
    return [*map(_parsed_calls, value)] if isinstance(value, list) else value


def _unread_keys(name: str, record: Mapping[str, Any], shown: _Shown) -> Iterator[str]:
    """Yield the keys of the turns in the field ``name`` with a text that is not shown."""
    for turn in _turns_of(record, name):
        for key, value in turn.items():
            if key in _OF_TURNS or describes(key, value):
                continue
            texts = [x for x in _own_texts(value) if len(x.split()) >= _FEWEST_WORDS]
            if not shown.all_of(texts):
                yield f"{name}[].{key}"


def _turns_of(record: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """Return the turns in the field ``name``, a list or the text of its JSON, as they are there."""
    turns: Any = ()
    with suppress(BadLineError):  # an instruction may show Python's notation of turns
        turns = turns_in(record.get(name), name)
    return [turn for turn in turns if isinstance(turn, dict)] if is_dialogue(turns) else []


def _is_of_numbers(key: str) -> bool:
    return key in _OF_NUMBERS or says_what_is_learned(key)


def _own_texts(value: object) -> list[str]:
    """Return the texts in a value that may say something of their own.

    These are the texts of several words, or, if there are none, the longest text. The names of
    roles are left out, and texts under keys that describe an object, such as its id.
    """
    texts = _texts_without(value, lambda key, _: _describes(key))
    texts = [text for text in texts if not is_role(text)]
    several = [text for text in texts if len(text.split()) > 1]
    return several or sorted(texts, key=len)[-1:]


def _texts_without(value: object, is_left_out: Callable[[str, object], bool]) -> Iterator[str]:
    """Yield the texts in a value of any form, except those of objects that ``is_left_out`` says.

    It gets the key of an object, and what is under it.
    """
    if isinstance(value, Mapping):
        for key, each in value.items():
            if not is_left_out(str(key), each):
                yield from _texts_without(each, is_left_out)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts_without(each, is_left_out)
    else:
        yield from _texts_in(value)


def refuse_attached(
    turns: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
    reads_key: Callable[[str], bool],
) -> None:
    """Raise BadLineError if a turn comes with a text or a file that no turn shows.

    Args:
        turns: the turns up to the last one that is learned, as
            :func:`~moetrain.data.messages.read_messages` returns them.
        variables: the variables of the template. Their ``documents`` are shown.
        reads_key: returns whether the template reads this key of a turn.
    """
    shown: _Shown | None = None
    for i, turn in enumerate(turns):
        _refuse_lost_parts(turn, f"messages[{i}]", reads_key)
        for place, key, value in _keys_of_turn(turn):
            words, is_answer = words_of(key), turn["role"] == "assistant"
            # A file that metadata name is where the turn is from, unless it is attached.
            is_metadata = place.partition(".")[0] in ABOUT_TURNS
            is_file = not words.isdisjoint(_OF_ATTACHMENTS if is_metadata else _OF_FILES)
            is_named = is_file or key.lower() in PASSAGES or not words.isdisjoint(_OF_SOURCES)
            if not is_named or describes(key, value) or (place == key and reads_key(key)):
                continue
            if not words.isdisjoint(_OF_RIGHT) and not words.isdisjoint(_OF_RIGHT_ANSWERS):
                continue
            where = f"messages[{i}].{place}"
            own = _own_texts(value)
            if is_file or key.lower() not in PASSAGES:  # one word may be a name or an address
                own = [text for text in own if len(text.split()) > 1]
            if not own and is_file and turn["role"] == "user":
                raise BadLineError(
                    f"{where} names a file whose text is not in the record: {shortened(value)}; "
                    "leave such records out, or write the text in `content` of the turn in its "
                    "place"
                )
            shown = shown or _Shown(_shown_by(turns, variables))
            lost = [text for text in own if not shown.all_of([text])]
            if not lost:
                continue
            text = shortened(max(lost, key=len))
            if is_answer:
                said = f"{where} may be what the answer rests on: {text}; write it in `content` of "
                raise BadLineError(f"{said}a turn before the answer, or leave it out")
            said = f"{where} may be a part of what is asked: {text}; write it in `content` of the "
            raise BadLineError(f"{said}turn, or leave it out")


def _refuse_lost_parts(
    turn: Mapping[str, Any], where: str, reads_key: Callable[[str], bool]
) -> None:
    """Raise BadLineError if the ``parts`` of a turn have a text that its ``content`` lacks.

    Gemini's turns have several parts, and the AI SDK's have them beside ``content``. Parts that are
    thoughts or calls, and those of an answer without content, are refused elsewhere.
    """
    parts, is_answer = turn.get("parts"), turn["role"] == "assistant"
    is_empty = is_answer and "tool_calls" not in turn and not text_of(turn).strip()
    if not isinstance(parts, list) or is_empty or reads_key("parts"):
        return
    shown = _Shown([text_of(turn), str(turn.get("reasoning_content", ""))])
    for j, part in enumerate(parts):
        if isinstance(part, Mapping):
            is_text = part.get("type") in (None, "text") and part.get("thought") is not True
            part = part.get("text") if is_text else None
        if isinstance(part, str) and not shown.all_of([part]):
            raise BadLineError(
                f"{where}.parts[{j}] has a text that `content` lacks, which would be lost: "
                f"{shortened(part)}; write the texts of all `parts` in `content`, or leave `parts` "
                "out",
                kind="`parts` of a turn have a text that `content` lacks",
            )


def _keys_of_turn(turn: Mapping[str, Any]) -> Iterator[tuple[str, str, object]]:
    """Yield the place, the key and the value of what a turn, or a part of its content, has beside
    its text."""
    for key, value in turn.items():
        if key not in _OF_TURNS:
            yield key, key, value
        elif key in ABOUT_TURNS and isinstance(value, Mapping):  # ChatGPT's `metadata`
            yield from ((f"{key}.{inner}", inner, each) for inner, each in value.items())
    parts = turn.get("content")
    for j, part in enumerate(parts) if isinstance(parts, list) else ():
        for key in part.keys() - _OF_TURNS:
            yield f"content[{j}].{key}", key, part[key]


def _shown_by(turns: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> Iterator[str]:
    """Yield the texts of turns, of their calls and of the documents."""
    for turn in turns:
        yield text_of(turn)
        yield from _texts_in([turn.get("reasoning_content"), turn.get("tool_calls")])
    yield from _texts_in(variables.get("documents"))


def _parsed(value: object) -> object:
    """Return what a text of JSON holds, as an export as CSV has it; any other value as it is."""
    if isinstance(value, str) and value.lstrip().startswith(("[", "{")):
        with suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def thoughts_of_field(key: str, value: object) -> list[str]:
    """Return the texts of the field ``key`` beside an answer that may be thoughts, or none."""
    if key.lower() not in _THOUGHTS and not _has_words(key, _OF_THOUGHTS):
        return []
    return [text for text in thoughts_in(value) if text.strip().lower() not in _MODES]


def refuse_lost_answer(record: Mapping[str, Any], turns: Sequence[Any], name: str) -> None:
    """Raise BadLineError if ``turns`` end with a question whose answer is in another field.

    If no field has an answer, a warning says once that the question, or the result of a tool, is
    left out.

    Args:
        record: the record.
        turns: its dialogue, with OpenAI's roles.
        name: the field that holds the dialogue.
    """
    if not turns or turns[-1]["role"] not in ("user", "tool"):
        return
    end = {"user": "question", "tool": "result of a tool"}[turns[-1]["role"]]
    answers = [turn for turn in turns if turn["role"] == "assistant"]
    shown = [text_of(turn) for turn in answers]
    shown += [json.dumps(turn["tool_calls"]) for turn in answers if "tool_calls" in turn]
    for key, value in record.items():
        if key.lower() in _AFTER_TURNS and key != name and is_check(value):
            raise BadLineError(
                f"`{name}` end with a {end}, and `{key}` says how a program checks its answer: "
                f"{shortened(value)}; let a policy answer for a reward that reads it (moetrain "
                "rl), or leave such records out"
            )
        if key not in (name, *_BY_ALL) and _answers_last(key, value, shown):
            raise BadLineError(
                f"`{name}` end with a {end}, and `{key}` seems to be its answer, which would be "
                f"lost: {shortened(value)}; write it as the last turn, with the role assistant, "
                "leave it out, or let a policy answer for a reward that reads it: moetrain rl"
            )
    if shown:
        warn_of_end(f"`{name}` of records", end)


def warn_of_end(dialogues: str, end: str) -> None:
    """Warn that some of ``dialogues`` have an ``end`` that is not learned."""
    warn_once(
        f"{end} at the end",
        f"{dialogues} end with a {end} that nothing answers: it is left out, and the "
        "answers before it are learned",
    )


def _answers_last(key: str, value: object, shown: Sequence[str]) -> bool:
    """Return whether the field ``key`` seems to hold the answer behind a dialogue.

    It has a name of :data:`_AFTER_TURNS` and a text, or it is what a server answers, whatever its
    name. ``shown`` are the answers of the dialogue. A text within one of them is no further answer.
    """
    is_named = key.lower() in _AFTER_TURNS
    text = value[0] if isinstance(value, list) and len(value) == 1 else value
    if isinstance(text, dict) and is_named:
        text = next((text[name] for name in ("content", "text") if name in text), text)
    if is_named and isinstance(text, str):
        is_whole = text.strip() in {each.strip() for each in shown}  # a class, answered once more
        return bool(text.strip()) and (is_whole or not is_said(text, shown))
    if not words_of(key).isdisjoint(_OF_BEFORE | {"chosen", "rejected"}):
        return False
    return is_answer_of_server(_parsed(value))


def is_answer_of_server(value: object) -> bool:
    """Return whether ``value`` is a message of the assistant, or an object or a list with one.

    These are the responses of OpenAI, Anthropic, Gemini, Bedrock and others. A dialogue with a
    user's turn is none.
    """
    return place_of_answer(value) is not None


def place_of_answer(value: object) -> str | None:
    """Return the place of the message of the assistant in what a server answers, as
    :func:`is_answer_of_server` finds it: ``.body.choices[0].message``. None: there is none."""
    found = [*_objects_in(value)]
    if any(role_of(each) == "user" for _, each in found):
        return None
    answers = (
        place + ".text" * (role_of(each) is None)
        for place, each in found
        if _is_answer(each) and any(_texts_in(each))
    )
    return next(answers, None)


def is_http_response(value: object) -> bool:
    """Return whether ``value`` is an answer of HTTP, as OpenAI's batches have it."""
    return isinstance(value, Mapping) and {"status_code", "body"} <= value.keys()


def warn_of_envelopes(documents: Iterable[Document]) -> None:
    """Warn once if an answer is the JSON of what a server answers, or what Python shows of it."""
    for document in documents:
        for start, end in document.loss_spans or ():
            text = document.text[start:end].rpartition("</think>")[2].lstrip()
            if not text.startswith("{") or not any(mark in text for mark in _OF_ENVELOPES):
                continue
            value = _literal(text[: text.rfind("}") + 1])
            place = None if is_message(value) else place_of_answer(value)
            if place is None and not is_http_response(value):
                continue
            remedy = "leave such records out"
            if place is not None:
                remedy = f"write the message in its `{place[1:]}` as the answer"
            warn_once(
                "answers that are envelopes",
                f"answers of records are the text of a server's response, and are learned as they "
                f"stand: {shortened(text)}; {remedy}",
            )


def _literal(text: str) -> object:
    """Return what a text of JSON, or of Python's notation, holds. None: it is neither."""
    for read in (json.loads, ast.literal_eval):
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            return read(text)
    return None


def _is_answer(value: Mapping[str, Any]) -> bool:
    """Return whether ``value`` is an assistant's message, or a text with the reason of its end."""
    if role_of(value) == "assistant":
        return not {"content", "parts", "tool_calls", "text"}.isdisjoint(value)
    return "text" in value and any(words_of(key) >= {"finish", "reason"} for key in value)


def _objects_in(value: object, place: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the objects in a value of any form with their places, the outer ones first."""
    if isinstance(value, Mapping):
        yield place, value
        for key, each in value.items():
            yield from _objects_in(each, f"{place}.{key}")
    elif isinstance(value, list | tuple):
        for i, each in enumerate(value):
            yield from _objects_in(each, f"{place}[{i}]")


def _has_words(key: str, words: Collection[str]) -> bool:
    """Return whether ``key`` has one of ``words``, and no word of a description or a variant."""
    found = words_of(key)
    return found.isdisjoint(_VARIANTS) and not _describes(key) and not found.isdisjoint(words)


def _describes(key: str) -> bool:
    words = words_of(key)
    is_of_model = key.lower().endswith("model")  # reasoning_model, but not model_reasoning
    is_of_use = words >= {"used", "in"} or words >= {"pass", "rate"}  # OpenMathReasoning's
    return is_of_model or is_of_use or not words.isdisjoint(_DESCRIBES)


def describes(key: str, value: object) -> bool:
    """Return whether a field only describes a record, and is no part of a question or an answer.

    Its name says so, or it holds no text.
    """
    return _describes(key) or not any(_texts_in(value))


def is_source_text(key: str, value: object) -> bool:
    """Return whether a field with the name of a source holds a text, such as the sentence to
    translate in WMT24++'s ``source``, and not the name of where the record is from."""
    if "source" not in words_of(key) or not isinstance(value, str):
        return False
    return len(value.split()) >= _FEWEST_WORDS_OF_SOURCE


def bad_value_of_flag(key: str, value: object) -> bool | None:
    """Return the truth value with which the field ``key`` says that a record is a bad one.

    It is true for ``is_bad_source``, and false for ``is_correct``. None: the value is no truth
    value, or the name does not say which of them is the bad one.
    """
    words = words_of(key)
    is_good, is_bad = not words.isdisjoint(_GOOD), not words.isdisjoint(_BAD)
    return None if truth_of(value) is None or is_good is is_bad else is_bad


def is_system(key: str) -> bool:
    """Return whether ``key`` names a system text that no form reads."""
    words = words_of(key)
    is_named = "system" in words and words - {"system"} <= _BESIDE_SYSTEM
    return is_named and key not in ("system", "system_prompt", "system_message")


def _texts_to_show(
    key: str, value: object, record: Mapping[str, Any], form: str, choices: Sequence[str]
) -> Sequence[str]:
    """Return the texts of the field ``key`` that a document of the record has to show."""
    name, is_pair = key.lower(), form == "preference"
    if is_pair and name == "rationale":  # it is the judge's, about both answers
        return []
    if not is_pair and "rejected" in words_of(key):  # it is not to be learned
        return []
    if thoughts := thoughts_of_field(key, value):
        return thoughts
    is_read = key in _BY_ALL | _READ.get(form, set()) | _ANSWERS_OF.get(form, set())
    if not is_pair and not is_read:  # templates may rewrite the thoughts of fields that are read
        thoughts = [text for text in _texts_in(value) if "</think>" in text]
        if thoughts:
            return thoughts
    if key in choices:
        return [*_texts_in(listed(value))]
    if name in _TEXTS or is_system(key):
        return texts_of_part(value)
    if key != name and name == "tools":
        return [*_texts_in(value)]
    may_hold_tools = key not in _BY_ALL and words_of(key).isdisjoint(_VARIANTS | _OF_OTHER_TOOLS)
    if may_hold_tools and (tools := names_of_tools(value)):
        return tools
    if is_pair:  # its question is read, and compared, in pairs
        return []
    if form in ("messages", "sharegpt"):
        is_asked = name in _ASKED_BESIDE_TURNS and isinstance(value, str)
    elif key in _READ.get(form, ()):
        return []
    else:
        is_asked = name in _ASKED | _PLAYED or _has_words(key, _OF_PASSAGES)
        # One text of this name may be another answer. DISC-Law's statutes are a list.
        is_asked |= name == "reference" and isinstance(listed(value), list)
        if name == "code" and isinstance(value, str):  # one word is the code of a language
            is_asked = len(value.split()) > 1
    if is_dialogue(value) and not _OF_BEFORE.isdisjoint(words_of(key)):
        return [text for text in _texts_in(value) if len(text.split()) > 1]
    texts = texts_of_part(value) if is_asked else []
    # Alpaca's `text` is the whole record, rendered, and so is `prompt` in copies of it.
    asked = record.get("instruction") or record.get("prompt")
    if name in ("text", "prompt") and isinstance(asked, str):
        texts = [text for text in texts if not is_said(asked, [text])]
    return texts


def _refuse_marks(turns: object, name: str) -> None:
    """Raise BadLineError if a turn has a mark in the place of a picture, a film or a sound."""
    for i, turn in enumerate(turns) if isinstance(turns, list) else ():
        said = turn.get("content", turn.get("value")) if isinstance(turn, dict) else None
        if isinstance(said, str) and _MARK_OF_TURN.search(said):
            raise lost_media(f"{name}[{i}] has a mark in the place of what", said)


def _problem(key: str, value: object, text: str, record: Mapping[str, Any], form: str) -> str:
    """Describe a text of the field ``key`` that would be lost, and say what to write."""
    name = key.lower()
    if pair := _second_pair(name, record):
        both = f"`{pair[0]}` and `{pair[1]}`"
        return (
            f"{both} are a second question and answer: {shortened(text)}; leave them out, or "
            + ("write them as `instruction` and `output` in place of the first")
        )
    if name in _PLAYED:  # tiny-codes' `scenario` describes the question
        said, remedy = "may be a part of the question", "write it in the question or as `system`"
    elif name in _SYSTEMS or is_system(key):
        said, remedy = "seems to be the system's text, which would be lost", "write it as `system`"
    elif name in _FUNCTIONS | {"tools"} or names_of_tools(value):
        said, remedy = "seems to hold the tools, which would be lost", "write them as `tools`"
    elif is_dialogue(value):  # GeneralThought's `prev_messages`
        said = "seems to have turns before the question, which would be lost"
        remedy = "write them before the question in `messages`"
    else:
        said, remedy = "may be a part of the question or of the answer", "write it in the question"
    if "</think>" in text:
        said, remedy = "has a thought, which would be lost", "write it as the answer"
    elif name in _THOUGHTS or _has_words(key, _OF_THOUGHTS):
        where = "`chosen` or `rejected`" if form == "preference" else "`messages`"
        remedy = f"write it as `reasoning_content` of an answer in {where}"
    return f"`{key}` {said}: {shortened(text)}; {remedy}, or leave it out"


def _second_pair(name: str, record: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the fields of a second question and answer, if ``name`` is that of the question.

    The ending of both names is the same: OpenSchnabeltier's ``instruction_de`` and ``output_de``.
    """
    first, _, end = name.rpartition("_")
    if first not in _ASKED | {"instruction", "prompt"} or not end:
        return None
    answers = (f"{answer}_{end}" for answer in sorted(_AFTER_TURNS))
    answer = next((answer for answer in answers if answer in record), None)
    return None if answer is None else (name, answer)


def _texts_in(value: object) -> Iterator[str]:
    """Yield the texts in a value of any form, but not the keys of objects."""
    if isinstance(value, str):
        if value.strip() and value.strip() not in ("[]", "{}"):
            yield value
    elif isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _texts_in(each)


def example_of_text(value: bool | float) -> str:
    """Return how a truth value (BoolQ's ``answer``) or a number may be written as a text."""
    return "'yes' or 'no'" if isinstance(value, bool) else f"'{value}'"


def is_check(value: object) -> bool:
    """Return whether a value, or the JSON of a text, says how a program checks an answer.

    It names a function, instructions or tests: RLVR-IFeval's ``ground_truth``.
    """
    found = _parsed(value)
    found = found[0] if isinstance(found, list) and found else found
    return isinstance(found, Mapping) and not _OF_CHECKS.isdisjoint(found)


def may_be_asked(key: str, value: object) -> bool:
    """Return whether a field beside an instruction and its answer may be a part of the question."""
    return bool(_texts_to_show(key, value, {}, "alpaca", []))


def texts_of_part(value: object) -> list[str]:
    """Return the texts in a value of any form that may be a part of a question.

    The name, the place and the number of an object (:func:`is_address`) only say where its other
    texts are from, and are left out if it has others.
    """
    return [*_texts_without(value, is_address)] or [*_texts_in(value)]


def is_address(key: str, value: object) -> bool:
    """Return whether a key of an object holds the name of a file, its place or a number of it.

    The ``name`` of anything else, such as a column of a table in a schema, may be asked about.
    """
    if not isinstance(value, str):
        return False
    words, is_file = words_of(key), _FILE.fullmatch(value.strip()) is not None
    if "name" in words and is_file:
        return True
    return not words.isdisjoint(_OF_ADDRESSES) and (is_file or len(value.split()) == 1)


def warn_of_parent(record: Mapping[str, Any]) -> None:
    """Warn once if a record names its conversation, as ProsocialDialog's, or the turn before it, as
    H2O's do."""
    keys = {words_of(key): key for key in record}
    dialogue = next((keys[words] for words in _IDS_OF_DIALOGUES if words in keys), None)
    turn = next((keys[words] for words in _IDS_OF_TURNS if words in keys), None)
    if dialogue and turn and not any(map(is_dialogue, record.values())):
        warn_once(
            f"turns by {turn}",
            f"`{dialogue}` and `{turn}` of records number the turns of conversations: each is "
            "learned alone; write whole conversations as `messages` to learn answers behind what "
            "was said",
        )
    for key, value in record.items():
        if names_turn_before(key, value):
            warn_once(
                f"parents by {key}",
                f"`{key}` of records names the turn before them: each is learned alone, without "
                "it; write whole conversations as `messages` to learn answers behind what was said",
            )


def warn_of_notes(turns: Iterable[Mapping[str, Any]]) -> None:
    """Warn once if a key of a turn says that not all of the dialogue see it: Zendesk's ``public``,
    Freshdesk's ``private``."""
    for turn in turns:
        for key, value in turn.items():
            words = words_of(key) - _OF_NOTES
            is_hidden = words == {"public"} if truth_of(value) is False else words in _HIDDEN
            if is_hidden and truth_of(value) is not None:
                warn_once(
                    f"notes by {key}",
                    f"`{key}` of turns is {shortened(value)}, as of a note that only one side of a "
                    f"dialogue sees: they are read as all turns are, such as "
                    f"{shortened(text_of(turn))}; leave such turns out",
                )


def names_turn_before(key: str, value: object) -> bool:
    """Return whether a field names the turn before a record, by its id: OASST's ``parent_id``,
    Claude Code's ``parentUuid``, ``in_response_to_tweet_id`` of customers' tweets."""
    words = words_of(key)
    if "parent" in words:
        is_named = words <= _OF_PARENTS and not words.isdisjoint({"id", "uuid"})
    else:
        is_named = words >= {"reply", "to"} or words >= {"response", "to"}
    if not is_named or not words.isdisjoint(_OF_PERSONS):
        return False
    is_id = isinstance(value, str | int | float) and not isinstance(value, bool)
    return is_id and len(str(value).split()) == 1


def order_of_turns(record: Mapping[str, Any]) -> str:
    """Say which turns belong to one dialogue and in which order, as an insertion of a sentence that
    asks to write them as ``messages``. Empty: no field of the turn ``record`` says it."""
    names = {words_of(key): f"`{key}`" for key, value in record.items() if value is not None}
    same = next((names[words] for words in _IDS_OF_DIALOGUES if words in names), "")
    # The first turn has no parent: the value is null there.
    before = next((f"`{key}`" for key in record if names_turn_before(key, record[key] or "0")), "")
    parts = [f"those with the same {same}"] * bool(same)
    parts += [f"in the order that {before} says"] * bool(before)
    return "".join(f", {part}" for part in parts)


# ---- verdicts -----------------------------------------------------------------------------------


def warn_of_tie(record: Mapping[str, Any]) -> None:
    """Warn once if neither answer of a pair is the better one, or if the rejected one is.

    Both are the same, have the same score (UltraFeedback's ``score_chosen`` and
    ``score_rejected``), or a field is the word tie (``status`` of distilabel's pairs of Orca).
    """
    ties: list[str] = []
    for name_of in _SCORES_OF_PAIRS:
        better, worse = (name_of.format(side) for side in ("chosen", "rejected"))
        high, low = record.get(better), record.get(worse)
        if not isinstance(high, int | float) or not isinstance(low, int | float):
            continue
        if high == low:
            ties.append(f"the same `{better}` and `{worse}`")
        elif high < low:
            warn_once(
                f"pairs the other way round by {better}",
                f"some pairs have a larger `{worse}` than `{better}`: they are learned as "
                "`chosen` and `rejected` say; exchange the two if the scores are right",
            )
    if record.get("chosen") and record["chosen"] == record.get("rejected"):
        ties.append("the same text")
    ties += [
        f"`{key}` {shortened(value)}"
        for key, value in record.items()
        if isinstance(value, str) and _TIE.fullmatch(value.strip()) and key not in _OF_PAIRS
    ]
    for tie in ties:
        warn_once(
            f"ties by {tie}",
            f"the answers of some pairs have {tie}: the pairs are learned as they stand; leave "
            "them out if a tie says nothing",
        )


def refuse_bad_verdict(record: Mapping[str, Any]) -> None:
    """Raise BadLineError if a field such as ``is_safe`` says that the answer is a bad one.

    If a field has a score of the answer, a warning says once for its name that it is not read.
    """
    of_turns = _keys_of_answers(record)
    for key, value in record.items():
        if key not in of_turns and _says_disliked(key, value) and not is_class(value, record):
            problem = f"`{key}` is {shortened(value)}: the answer is one to avoid, and would be "
            problem += f"learned: {shortened(dict(record))}"
            remedy = 'leave such records out, write "label": false in its place and set '
            remedy += "train.objective kto, or rename the field if it means something else"
            raise BadLineError(f"{problem}; {remedy}", kind=f"`{key}` is {shortened(value)}")
        if key in of_turns:  # WildChat's `toxic`: that of the record is also about questions
            continue
        if _says_bad(key, value) or _is_rejected(key, value, record):
            problem = f"`{key}` is {shortened(value)}: the answer is one to avoid, and would be "
            problem += f"learned: {shortened(dict(record))}"
            remedy = "leave such records out, or rename the field if it means something else"
            raise BadLineError(f"{problem}; {remedy}", kind=f"`{key}` is {shortened(value)}")
        _warn_of_score(key, value, "records")


def refuse_bad_turn(turn: Mapping[str, Any], where: str) -> None:
    """Raise BadLineError if a key of a turn to learn says that it is a bad one: WildChat's
    ``toxic``. ``where`` is the place of the turn."""
    for key, value in turn.items():
        if key in _OF_TURNS:
            continue
        if _says_bad(key, value) or _says_disliked(key, value):
            problem = f"{where}.{key} is {shortened(value)}: the answer is one to avoid, and would "
            problem += f"be learned: {shortened(text_of(turn))}"
            remedy = 'leave such records out, or write "weight": 0 in the turn'
            kind = f"`{key}` of a turn is {shortened(value)}"
            raise BadLineError(f"{problem}; {remedy}", kind=kind)
        _warn_of_score(key, value, "turns")


def liking_of(value: object) -> bool | None:
    """Return whether ``value`` says that a user liked an answer: a thumb, a vote, ``positive``.

    None: it says nothing of it, or its texts say both.
    """
    said = {
        " ".join(re.split(r"[\s_-]+", _OF_SHADES.sub("", each).strip()))
        for text in _texts_in(value)
        for each in (text.lower(), re.sub(r"(?<=[a-z])(?=[A-Z])", " ", text).lower())
    }
    is_liked, is_disliked = not said.isdisjoint(_LIKED), not said.isdisjoint(_DISLIKED)
    return None if is_liked is is_disliked else is_liked


def is_class(value: object, record: Mapping[str, Any]) -> bool:
    """Return whether the answer of a record is short and says the word ``value`` itself: it is a
    class, such as the ``negative`` of a review, and no judgement."""
    if not isinstance(value, str) or not value.strip().isalpha():
        return False
    turns = [turn for name in ("messages", "conversations") for turn in _turns_of(record, name)]
    last = [text_of(turn) or turn.get("value") for turn in turns if role_of(turn) == "assistant"]
    answers = [*_texts_in([record.get("output"), record.get("completion"), *last[-1:]])]
    word = value.strip().lower()
    return any(
        len(text.split()) <= _MOST_WORDS_OF_CLASS and word in re.findall(r"\w+", text.lower())
        for text in answers
    )


_MOST_WORDS_OF_CLASS = 8
"""Most words of an answer that names a class, such as ``The sentiment is negative.``"""


def _names_feedback(key: str) -> bool:
    """Return whether the name of a field says that it holds what users say of an answer."""
    words = words_of(key)
    # A user_rating is the user's, and no rating of the user.
    return not words.isdisjoint(_OF_FEEDBACK) and words.isdisjoint(_OF_PROMPTS - {"user"})


def is_feedback(key: str, value: object) -> bool:
    """Return whether a field beside an answer says, by a word, that a user likes it or not.

    Such fields are read: a bad answer is refused, or is one to avoid.
    """
    is_named = _names_feedback(key) or key in _OF_LABELS
    return is_named and isinstance(value, str) and liking_of(value) is not None


def _says_disliked(key: str, value: object) -> bool:
    """Return whether a field says that a user calls the answer a bad one."""
    if not _names_feedback(key):
        return False
    words = words_of(key)
    if "down" in words and not words.isdisjoint({"thumb", "thumbs"}):
        return truth_of(value) is True
    is_bad = isinstance(value, str) and value.strip().lower() in _BAD
    # A rating of another word is named as a score: Zendesk's is that of a whole ticket.
    return liking_of(value) is False or (is_bad and "rating" not in words)


def _keys_of_answers(record: Mapping[str, Any]) -> set[str]:
    """Return the keys of the assistant's turns in the dialogue of a record."""
    names = ("messages", "conversations", "completion")
    turns = (turn for name in names for turn in _turns_of(record, name))
    answers = (turn for turn in turns if role_of(turn) == "assistant")
    return {key for turn in answers for key, value in turn.items() if value is not None}


def _says_bad(key: str, value: object) -> bool:
    """Return whether a field says that an answer is a bad one."""
    words = words_of(key)
    verdict = words - _OF_VERDICTS
    if len(verdict) == 1 and verdict <= _GOOD | _BAD:
        return _verdict(value, "is" in words or verdict <= _ENDS) is verdict.issubset(_BAD)
    return is_bad_label(key, value)


def _warn_of_score(key: str, value: object, of: str) -> None:
    if is_score(key, value):
        warn_once(
            f"the score {key}",
            f"`{key}` of {of} is not read: the answers are learned whatever it is; keep the "
            f"{of} whose answers are good enough",
        )


def _is_rejected(key: str, value: object, record: Mapping[str, Any]) -> bool:
    """Return whether ``answer`` is an annotator's word about the answer in another field."""
    if key != "answer" or not isinstance(value, str):
        return False
    others = (text for name in record if name != key for text in _texts_in(record[name]))
    return _ANNOTATED.get(value.strip().lower()) is False and not is_said(value, others)


def is_score(key: str, value: object) -> bool:
    """Return whether a field has a score of the answer."""
    words = words_of(key)
    is_named = not words.isdisjoint(_OF_SCORES) and words.isdisjoint(_OF_NO_SCORES)
    # Zendesk's satisfaction_rating is an object whose score is a word.
    is_bad = any(text.strip().lower() in _BAD for text in _texts_in(value))
    return is_named and (_has_number(value) or is_bad)


def _has_number(value: object) -> bool:
    """Return whether a value is a number, holds one or is the text of such a value.

    Label Studio and Argilla write lists of ratings.
    """
    if isinstance(value, Mapping):
        return any(_has_number(each) for key, each in value.items() if key not in _TRUTHS)
    if isinstance(value, list | tuple):
        return any(map(_has_number, value))
    if isinstance(value, str):
        parsed = _parsed(value)  # Toucan's assessments are the text of an object
        if not isinstance(parsed, str):
            return _has_number(parsed)
        return re.fullmatch(r"-?\d+(?:\.\d+)?", value.strip()) is not None
    return type(value) in (int, float)


def is_about_answer(key: str) -> bool:
    """Return whether the name of a field says that it judges the answer, not what is asked."""
    words = words_of(key)
    if words.isdisjoint(_JUDGING) or not words.isdisjoint(_OF_PROMPTS):
        return False
    return not words.isdisjoint(_OF_ANSWERS | {"verdict", "judgement", "judgment", "correctness"})


def names_verdict(key: str) -> bool:
    """Return whether the name of a field says that its truth value judges an answer."""
    return not words_of(key).isdisjoint(_GOOD | _BAD | _JUDGING | _OF_SCORES)


def is_label(value: object) -> bool:
    """Return whether a value is a word that judges, such as ``unsafe`` or ``correct``."""
    return isinstance(value, str) and value.strip().lower() in {*_GOOD, *_BAD, *_ANNOTATED}


def is_about_question(key: str) -> bool:
    """Return whether the name of a field says that it describes what is asked, not the answer."""
    words = words_of(key)
    return words.isdisjoint(_OF_ANSWERS) and not words.isdisjoint(_OF_PROMPTS)


def is_bad_label(key: str, value: object) -> bool:
    """Return whether a field says that the answer is a bad one.

    It says so by a word such as ``harmful``, or by the value false if its name says ``correct`` or
    ``correctness``.
    """
    is_bad = isinstance(value, str) and value.strip().lower() in _BAD
    words = words_of(key)
    if truth_of(value) is False and not words.isdisjoint({"correct", "correctness"}):
        return words.isdisjoint(_OF_PROMPTS)  # KodCode's r1_correctness
    return is_bad and is_about_answer(key)


def _verdict(value: object, is_named: bool) -> bool | None:
    """Return the truth value of a verdict. None: it has none.

    ``is_named`` is True if the name of the field says that 0 and 1 are truth values too.
    """
    return bool(value) if is_named and value in (0, 1) else truth_of(value)
