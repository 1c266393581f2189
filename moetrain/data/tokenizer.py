"""Encodes texts as token ids and decodes them, by bytes or by any Hugging Face ``tokenizer.json``.

The byte tokenizer needs no files, so a fresh machine can train at once. The rest of the package
loads a tokenizer by :func:`load_tokenizer`, and uses it as a :class:`Tokenizer`. Left out on
purpose: padding and truncation (rows are packed), and the special tokens that a post-processor
would put after a text (each document ends with one EOS).

Shapes: T tokens.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import huggingface_hub
import numpy as np
import tokenizers

from moetrain.config import ConfigError, logger
from moetrain.models.hf.files import TokenizerFiles, read_json, read_small, small_files

_wrong = partial(ConfigError, "data.tokenizer")

_END_OF_TEXT = "<|endoftext|>"
"""The text that stands for the byte tokenizer's EOS where special tokens are written out."""
_CONFIG = "tokenizer_config.json"
_CHAT_TEMPLATE = "chat_template.jinja"
_TOOL_TEMPLATE = "additional_chat_templates/tool_use.jinja"
_CLASS = {"tokenizer_class": "PreTrainedTokenizerFast"}
_EOS_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|im_end|>")
"""Usual texts of EOS, for a tokenizer.json if no file beside it names EOS."""


class _Encoded(NamedTuple):
    """The tokens of a text. Offsets are computed on demand, since only masked texts need them."""

    ids: np.ndarray
    """[T] integers."""
    offsets: Callable[[], np.ndarray]
    """Returns the characters ``start:end`` that each token covers, [T, 2] int64."""


class Tokenizer(Protocol):
    """A tokenizer as the rest of the package uses it."""

    vocab_size: int
    """Largest id + 1."""
    eos_id: int
    """The token that ends every document."""
    bos_ids: tuple[int, ...]
    """The tokens that Hugging Face's tokenizer puts before a plain text: mostly BOS, or none.
    Documents and prompts begin with them. They are not added to a text that a chat template
    rendered, nor to a text that begins with them already (:meth:`missing_bos`)."""
    added_ids: Mapping[str, int] = MappingProxyType({})
    """The ids of tokens that ``data.new_tokens`` and the files beside ``tokenizer.json`` add."""
    fingerprint: str
    """Hash of everything that decides the ids of a text or a conversation, except the template."""
    chat_template: str | None = None
    """The tokenizer's Jinja template for conversations. None: it has none."""
    tool_template: str | None = None
    """The template for conversations with tools. None: ``chat_template`` renders these too."""
    template_files: tuple[str | None, str | None] = (None, None)
    """The files that hold ``chat_template`` and ``tool_template``, for messages."""
    chat_template_kwargs: Mapping[str, Any] = MappingProxyType({})
    """Further variables of both templates."""
    given_template: str | None = None
    """The template from data.chat_template. None: the files' own template is used."""
    special_tokens: dict[str, str]
    """The texts of special tokens, by the template's variables ``bos_token``, ``eos_token``, ..."""
    file: Path | None = None
    """The tokenizer.json that the tokenizer was read from. None: there is no such file."""
    special_ids: dict[str, int | None]
    """The ids of ``special_tokens``. None: the text is no token, or none that the model knows."""
    added_tokens: Mapping[str, int]
    """The ids of texts that are one token wherever they occur, such as ``<|im_end|>``."""
    byte_ids: frozenset[int]
    """Tokens of one byte each (byte fallback). Successive byte tokens are decoded together, and one
    byte that is not valid UTF-8 makes all of them undecodable."""

    def encode_batch(self, texts: Sequence[str]) -> list[_Encoded]:
        """Encode each text, without special tokens at its ends."""
        ...

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Decode ``ids``. Bytes that are not UTF-8 become U+FFFD.

        If ``skip_special_tokens`` is True, special tokens are left out, otherwise their texts are
        written.
        """
        ...

    def whole_json(self) -> str:
        """Return the text of a tokenizer.json that has all tokens, also those of other files."""
        file = self._files()["tokenizer.json"]
        return file if isinstance(file, str) else file.read_text("utf-8")

    def _files(self) -> dict[str, Path | str]:
        """Return the files of :meth:`export`, by name, with the tokenizer's own template."""
        ...

    def export(self, chat_template: str | None = None) -> TokenizerFiles:
        """Return the files that ``transformers`` and servers read, and the ids of special tokens.

        ``chat_template`` is the template to write, also for conversations with tools. None: the
        tokenizer's own template is written, if it has one.
        """
        files = self._files()
        if chat_template in (None, self.chat_template):
            chat_template = self.given_template
        if chat_template is not None:
            files[_CHAT_TEMPLATE] = chat_template
            files.pop(_TOOL_TEMPLATE, None)
        ids = {f"{key}_id": self.special_ids.get(key) for key in ("bos_token", "pad_token")}
        return TokenizerFiles(files, {**ids, "eos_token_id": self.eos_id}, self.file)

    def missing_bos(self, ids_T: np.ndarray) -> tuple[int, ...]:
        """Return ``bos_ids``, or no ids if the tokens ``ids_T`` of a text begin with them."""
        return () if tuple(ids_T[: len(self.bos_ids)].tolist()) == self.bos_ids else self.bos_ids

    def encode_prompt(self, text: str) -> list[int]:
        """Encode ``text`` as a prompt, with ``bos_ids`` before it unless it begins with them.

        Raises ValueError: there are no tokens, or ``text`` has surrogates, which stand for bytes of
        a command line that are not UTF-8.
        """
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{text!r} is not text") from None
        ids_T = self.encode_batch([text])[0].ids
        ids = [*self.missing_bos(ids_T), *ids_T.tolist()]
        if not ids:
            raise ValueError(f"{text!r} has no tokens to continue")
        return ids


class ByteTokenizer(Tokenizer):
    """Encodes text as its bytes in UTF-8. The id 256 ends a document."""

    vocab_size = 257
    eos_id = 256
    bos_ids = ()
    added_tokens: Mapping[str, int] = MappingProxyType({})  # no text contains EOS
    byte_ids = frozenset()  # an invalid byte makes no other byte undecodable
    fingerprint = "byte"

    def __init__(self) -> None:
        self.special_tokens = {"eos_token": _END_OF_TEXT}
        self.special_ids = {"eos_token": self.eos_id}

    def encode_batch(self, texts: Sequence[str]) -> list[_Encoded]:
        """Encode each text. Ids are uint8."""
        return [
            _Encoded(np.frombuffer(text.encode(), dtype=np.uint8), partial(_byte_offsets, text))
            for text in texts
        ]

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        others = {} if skip_special_tokens else {self.eos_id: _END_OF_TEXT.encode()}
        parts = (bytes([i]) if i < self.eos_id else others.get(i, b"") for i in ids)
        return b"".join(parts).decode(errors="replace")

    def _files(self) -> dict[str, Path | str]:
        """Return an exact equivalent: a byte-level BPE without merges, whose ids are the bytes.

        EOS is not an added token in tokenizer.json, and because of ``split_special_tokens``
        ``transformers`` does not make it one. So no text contains EOS.
        """
        level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        # GPT-2 writes a byte as the character with its number, or as one from U+0100 on.
        alphabet = sorted(level.alphabet())
        others = (symbol for symbol in alphabet if ord(symbol) > 255)
        vocabulary = {chr(i) if chr(i) in alphabet else next(others): i for i in range(256)}
        model = tokenizers.models.BPE(vocab={**vocabulary, _END_OF_TEXT: self.eos_id}, merges=[])
        backend = tokenizers.Tokenizer(model)
        backend.pre_tokenizer = level
        backend.decoder = tokenizers.decoders.ByteLevel()
        config = {**_CLASS, "eos_token": _END_OF_TEXT, "split_special_tokens": True}
        config["clean_up_tokenization_spaces"] = False
        return {
            "tokenizer.json": backend.to_str(pretty=True) + "\n",
            _CONFIG: json.dumps(config, indent=2) + "\n",
        }


class _HFTokenizer(Tokenizer):
    """A ``tokenizer.json``, with the special tokens and templates of the files beside it."""

    def __init__(self, file: Path, new_tokens: Sequence[str] = ()) -> None:
        """Read ``file`` and the files beside it, and add ``new_tokens``.

        Raises ConfigError: a file cannot be read or is malformed, there are no tokens, no token is
        known as EOS, or ``new_tokens`` would be split in texts.
        """
        folder = file.parent
        config = _read_json(folder / _CONFIG)
        if "added_tokens_decoder" not in config:  # as `transformers` reads older checkpoints
            config |= _read_json(folder / "special_tokens_map.json")
        content = read_small(file, folder, "data.tokenizer")
        with _library_errors(f"{file} is not a tokenizer"):
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
            padding = self._tokenizer.padding
            self._tokenizer.no_padding()
            self._tokenizer.no_truncation()
            own = self._tokenizer.get_vocab(with_added_tokens=True)
        self.file = self._file = file
        named = _named_tokens(config, folder)
        self._added = _tokens_of_config(self._tokenizer, config, named, folder)
        self._new_tokens = [*new_tokens]
        self._added += [
            tokenizers.AddedToken(x, special=True, normalized=False) for x in new_tokens
        ]
        with _library_errors(f"{folder}/{_CONFIG}: its tokens cannot be added"):
            self._tokenizer.add_tokens(self._added)
            # If this is true, special tokens in texts are split like other characters, as in
            # `transformers`.
            self._splits_special = bool(config.get("split_special_tokens"))
            self._tokenizer.encode_special_tokens = self._splits_special
            vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if self._splits_special and new_tokens:
            problem = f"{folder}/{_CONFIG} sets split_special_tokens, which splits them in texts"
            raise ConfigError("data.new_tokens", f"{problem}; remove that there, or unset this")
        self.added_ids = {token: i for token, i in vocabulary.items() if token not in own}
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        splits = self._tokenizer.encode_special_tokens
        added = self._tokenizer.get_added_tokens_decoder().items()
        self.added_tokens = {t.content: i for i, t in added if not (splits and t.special)}
        self.byte_ids = frozenset(i for t, i in vocabulary.items() if t.startswith("<0x"))
        self.special_tokens = {key: token.content for key, token in named.items()}
        if "eos_token" not in self.special_tokens:
            name = next((name for name in _EOS_NAMES if name in vocabulary), None)
            if name is None:
                problem = f"{file} has no known end-of-text token; name one as eos_token in a "
                raise _wrong(f"{problem}tokenizer_config.json beside it")
            logger.info("data.tokenizer: nothing names the EOS token of %s; using %r", file, name)
            self.special_tokens["eos_token"] = name
        self.special_ids = {key: vocabulary.get(t) for key, t in self.special_tokens.items()}
        listed = {token.content: i for i, token in _listed_tokens(config, named, folder)}
        wrong = [(text, i) for text, i in listed.items() if vocabulary.get(text) != i]
        for text, i in wrong[:1]:
            said = f"{text!r} the id {i}, but {file} gives it {vocabulary.get(text)}, which is used"
            logger.warning("data.tokenizer: %s gives %s (%d such)", folder, said, len(wrong))
        # A named token that is new to the vocabulary and in no list is unknown to the model, so it
        # can neither end a document nor begin one.
        for key in ("eos_token", "bos_token"):
            if self.special_tokens.get(key) in self.added_ids.keys() - listed.keys():
                self.special_ids[key] = None
        self.eos_id = self._id_of("eos_token")
        self.bos_ids = self._find_bos(vocabulary)
        if not self.bos_ids and config.get("add_bos_token") and "bos_token" in self.special_tokens:
            self.bos_ids = (self._id_of("bos_token"),)
        # Remove the post-processor: with `trim_offsets`, the characters that a token covers would
        # lack blanks. The tokens that it puts before a text are in `bos_ids`.
        self._tokenizer.post_processor = None
        # chat_template.jinja replaces all templates in the config, as in `transformers`.
        if os.path.lexists(folder / _CHAT_TEMPLATE):
            config = {key: value for key, value in config.items() if key != "chat_template"}
        self.chat_template, chat_file = _chat_template(folder, _CHAT_TEMPLATE, config, "default")
        self.tool_template, tool_file = _chat_template(folder, _TOOL_TEMPLATE, config, "tool_use")
        self.template_files = (str(chat_file), str(tool_file))
        about: list[Any] = [self.special_tokens, self.bos_ids]
        if self._added or self._splits_special:  # otherwise old caches keep their key
            about += [[repr(token) for token in self._added], self._splits_special]
        special = json.dumps(about, sort_keys=True)
        self.fingerprint = hashlib.sha256(content + special.encode()).hexdigest()
        pads = {self.special_tokens.get("pad_token"), (padding or {}).get("pad_token")}
        for pad in sorted(pads - {None}):
            if roles := self._other_roles(pad):
                said = f"PAD is {' and '.join(roles)} ({pad!r}, id {vocabulary.get(pad)})"
                why = "Loss is masked by position, not by id, so such tokens in a text keep it"
                logger.warning("data.tokenizer: %s. %s", said, why)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._tokenizer.encode_special_tokens = self._splits_special  # pickles lack this setting

    def _id_of(self, key: str) -> int:
        """Return the id of a special token. Raises ConfigError: its text is no token."""
        found = self.special_ids[key]
        if found is None:
            raise _wrong(f"{self._file} has no token {self.special_tokens[key]!r}, its {key}")
        return found

    def _other_roles(self, pad: str) -> list[str]:
        """Return the roles other than padding in which the token ``pad`` may occur in a text."""
        keys = sorted(self.special_tokens, key="eos_token".__ne__)  # EOS comes first
        same = [key for key in keys if self.special_tokens[key] == pad and key != "pad_token"]
        roles = [key.removesuffix("_token").upper() for key in same]
        if any(pad in (text or "") for text in (self.chat_template, self.tool_template)):
            roles.append("a token of the chat template")
        return roles

    def _find_bos(self, vocabulary: Iterable[str]) -> tuple[int, ...]:
        """Find the tokens that the post-processor puts before a text.

        It is tried on ``a``, and if this text has no tokens, on the texts of the vocabulary.
        """
        if self._tokenizer.num_special_tokens_to_add(is_pair=False) == 0:
            return ()
        for text in ("a", *vocabulary):
            with _library_errors(f"the tokenizer cannot encode {text!r}"):
                encoding = self._tokenizer.encode(text)
            own = [i for i, sequence in enumerate(encoding.sequence_ids) if sequence is not None]
            if own:
                return tuple(encoding.ids[: own[0]])
        return ()

    def encode_batch(self, texts: Sequence[str]) -> list[_Encoded]:
        """Encode each text on all cores. Ids are uint32."""
        with _library_errors(f"the tokenizer cannot encode a text: {self._file}"):
            encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [_Encoded(np.array(e.ids, np.uint32), partial(_offsets, e)) for e in encodings]

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        # EOS is left out even if the file does not call it a special token.
        own = [i for i in ids if i != self.eos_id or not skip_special_tokens]
        with _library_errors(f"the tokenizer cannot decode tokens: {self._file}"):
            return self._tokenizer.decode(own, skip_special_tokens=skip_special_tokens)

    def whole_json(self) -> str:
        if not self.added_ids and not self._new_tokens:
            return super().whole_json()
        whole = tokenizers.Tokenizer.from_file(str(self._file))
        whole.add_tokens(self._added)
        return whole.to_str()

    def _files(self) -> dict[str, Path | str]:
        """Return tokenizer.json and the files beside it. The config among them names EOS."""
        folder = self._file.parent
        names = filter(TokenizerFiles.has, small_files(folder))
        files: dict[str, Path | str] = {name: folder / name for name in names}
        files["tokenizer.json"] = self.whole_json() if self._new_tokens else self._file
        config = read_json(folder / _CONFIG) if _CONFIG in files else _CLASS
        if "eos_token" not in config:
            files[_CONFIG] = json.dumps({**config, **self.special_tokens}, indent=2) + "\n"
        return files


def load_tokenizer(
    name: str, vocab_size: int | None = None, new_tokens: Sequence[str] = ()
) -> Tokenizer:
    """Load the tokenizer that ``data.tokenizer`` names.

    Args:
        name: ``byte``, a tokenizer.json, a folder that holds one, or a hub id. The files
            of a hub id are downloaded unless the hub's cache has them (``HF_HUB_OFFLINE`` forbids
            downloads).
        vocab_size: number of ids that the model takes. None: any number will do.
        new_tokens: texts that become special tokens. Texts that are not tokens yet get
            the next free ids.

    Raises ConfigError: there is nothing of that name, the tokenizer cannot be used, it has more
    tokens than the model, or it takes no new tokens.
    """
    if name == "byte" and new_tokens:
        problem = f"{','.join(new_tokens)!r}, but data.tokenizer is 'byte', which has bytes alone"
        raise ConfigError("data.new_tokens", f"{problem}; name another tokenizer, or unset this")
    tokenizer = ByteTokenizer() if name == "byte" else _HFTokenizer(_file_of(name), new_tokens)
    if vocab_size is not None and tokenizer.vocab_size > vocab_size:
        count = tokenizer.vocab_size
        problem = f"{name!r}{' with data.new_tokens' * bool(new_tokens)} has {count} tokens, "
        problem += f"more than the model's vocabulary of {vocab_size}"
        remedy = f"set model.vocab_size {count}, which gives each token a row"
        beyond = [token for token, i in tokenizer.added_ids.items() if i >= vocab_size]
        if len(beyond) == count - vocab_size and not new_tokens:
            which = f"{_CONFIG} alone adds {', '.join(map(repr, beyond[:3]))} after the last"
            raise _wrong(f"{problem}: {which}; remove these there, or {remedy}")
        raise _wrong(f"{problem}; use the model's own, or {remedy}")
    return tokenizer


def _file_of(name: str) -> Path:
    """Return the tokenizer.json that ``name`` names. Raises ConfigError: there is none."""
    if os.path.isfile(name):
        return Path(name)
    folder = name
    if not os.path.isdir(name):
        try:
            folder = huggingface_hub.snapshot_download(name, allow_patterns=[*TokenizerFiles.NAMES])
        except (OSError, ValueError) as error:
            said = (str(error) or repr(error)).splitlines()[0]
            problem = f"{name!r} is neither a file, a folder nor a hub id that can be reached"
            remedy = "give a tokenizer.json, or a folder that holds one"
            raise _wrong(f"{problem}, {said}; {remedy}") from None
    if not os.path.lexists(file := Path(folder, "tokenizer.json")):
        raise _wrong(f"{name!r} holds no tokenizer.json; name a folder that holds one")
    return file


@contextmanager
def _library_errors(doing: str) -> Iterator[None]:
    """Turn the library's errors into ConfigError. Their only common class is Exception."""
    try:
        yield
    except BaseException as error:
        # A panic in the library's Rust code is not an Exception. Its class cannot be imported.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        said = " ".join(str(error).split())
        raise _wrong(f"{doing}: {said:.500}") from None


def _offsets(encoding: tokenizers.Encoding) -> np.ndarray:
    return np.array(encoding.offsets, np.int64).reshape(-1, 2)


def _byte_offsets(text: str) -> np.ndarray:
    """Return the characters that each UTF-8 byte is in, int64 [T, 2].

    The bytes of ``"aé"`` give (0, 1), (1, 2), (1, 2).
    """
    code_points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    bytes_per_character = 1 + sum((code_points >= n).astype(int) for n in (0x80, 0x800, 0x10000))
    start = np.repeat(np.arange(len(text)), bytes_per_character)
    return np.stack([start, start + 1], axis=1)


def _read_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in ``path``. Return an empty one if there is no such file."""
    return read_json(path, "data.tokenizer") if os.path.lexists(path) else {}


_NAMED = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
"""The special tokens that every tokenizer may have, in the order of ``transformers``."""


def _token_of(value: Any, key: str, folder: Path, **defaults: bool) -> tokenizers.AddedToken:
    """Make a token from an entry of a file: a string, or an object with ``content``.

    Raises ConfigError: the entry is neither.
    """
    fields: Any = {"content": value} if isinstance(value, str) else value
    if not isinstance(fields, dict) or not isinstance(fields.get("content"), str):
        raise _wrong(f"{folder}/{_CONFIG}: {key} {value!r:.80} is no token")
    own = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
    fields = {name: fields[name] for name in own if name in fields}
    try:
        return tokenizers.AddedToken(**(fields | defaults))
    except TypeError as error:
        raise _wrong(f"{folder}/{_CONFIG}: {key} {value!r:.80} is no token: {error}") from None


def _named_tokens(config: Mapping[str, Any], folder: Path) -> dict[str, tokenizers.AddedToken]:
    """Read the tokens that a config names, ``{"eos_token": AddedToken("</s>"), ...}``.

    The keys are variables of the template. A model may have keys of its own (``image_token``), also
    within ``extra_special_tokens``.
    """
    extra = config.get("extra_special_tokens")
    own = {key: x for key, x in config.items() if key.endswith("_token") and key not in _NAMED}
    texts = {key: x for key, x in own.items() if isinstance(x, str)}  # `add_bos_token` is a switch
    objects = {key: x for key, x in own.items() if isinstance(x, dict) and "__type" in x}
    named = {key: config[key] for key in _NAMED if config.get(key) is not None} | objects | texts
    named |= extra if isinstance(extra, dict) else {}
    return {key: _token_of(value, key, folder, special=True) for key, value in named.items()}


def _listed_tokens(
    config: Mapping[str, Any], named: Mapping[str, tokenizers.AddedToken], folder: Path
) -> list[tuple[int, tokenizers.AddedToken]]:
    """Return (id, token) of each entry of ``added_tokens_decoder``, in the order of the ids.

    Older checkpoints have the file added_tokens.json instead. Raises ConfigError: either of them is
    malformed.
    """
    special = {token.content for token in named.values()}
    if "added_tokens_decoder" in config:
        key, entries = "added_tokens_decoder", config["added_tokens_decoder"]
    else:
        key, entries = "added_tokens.json", {}
        for text, index in _read_json(folder / key).items():
            is_special = text in special
            about = {"content": text, "special": is_special, "normalized": not is_special}
            entries[index] = about
    if not isinstance(entries, dict):
        raise _wrong(f"{folder}/{_CONFIG}: {key} is {entries!r:.80}, expected an object")
    found: list[tuple[int, tokenizers.AddedToken]] = []
    for index, value in entries.items():
        if not str(index).isdecimal():
            raise _wrong(f"{folder}: {key} has {index!r:.80}, expected an id")
        content = value.get("content") if isinstance(value, dict) else value
        more = {"special": True} if content in special else {}
        found.append((int(index), _token_of(value, key, folder, **more)))
    return sorted(found, key=lambda item: item[0])


def _tokens_of_config(
    tokenizer: tokenizers.Tokenizer,
    config: Mapping[str, Any],
    named: Mapping[str, tokenizers.AddedToken],
    folder: Path,
) -> list[tokenizers.AddedToken]:
    """List the tokens that the files beside tokenizer.json add, in the order of ``transformers``.

    First come the tokens that have an id in these files, then the named tokens, then
    ``extra_special_tokens``. Each becomes a single token wherever it occurs in a text. It gets the
    next free id, unless the vocabulary already has it.
    """
    there = {repr(token) for token in tokenizer.get_added_tokens_decoder().values()}
    listed = [token for _, token in _listed_tokens(config, named, folder)]
    tokens = [token for token in listed if repr(token) not in there]
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    if not isinstance(extra, list | dict):
        raise _wrong(f"{folder}/{_CONFIG}: extra_special_tokens is {extra!r:.80}, expected a list")
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    known |= {token.content for token in tokens}
    others = [*named.values()]
    if isinstance(extra, list):
        key = "extra_special_tokens"
        for value in extra:
            # An object says itself whether its token is special.
            is_special = not isinstance(value, dict) or value.get("special", True)
            others.append(_token_of(value, key, folder, special=is_special))
    for token in others:
        if token.content not in known:
            known.add(token.content)
            tokens.append(token)
    return tokens


def _chat_template(
    folder: Path, file_name: str, config: dict[str, Any], name: str
) -> tuple[str | None, Path]:
    """Read the template ``name`` from its own file, otherwise from ``tokenizer_config.json``.

    Returns:
        The template, or None if there is none, and the file that it is looked for in.

    Raises ConfigError: the template is no text.
    """
    file = folder / file_name
    if os.path.lexists(file):
        try:
            return read_small(file, folder, "data.tokenizer").decode(), file
        except UnicodeDecodeError as error:
            raise _wrong(f"{file} is not UTF-8: {error.reason}") from None
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {e.get("name"): e.get("template", 0) for e in template if isinstance(e, dict)}
        template = named.get(name, 0 if name == "default" else None)
    elif name != "default":
        return None, file
    if template is not None and not isinstance(template, str):
        wanted = 'a list of {"name": ..., "template": ...} with one named default'
        raise _wrong(f"{folder}/{_CONFIG}: chat_template is neither a text nor {wanted}")
    return template, folder / _CONFIG
