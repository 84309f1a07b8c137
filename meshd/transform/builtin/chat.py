"""The op `tokenize_chat`: conversations rendered by a chat template, as tokens or as a mask of answers.

Law: the text is what Hugging Face's `apply_chat_template` renders, in Jinja's immutable sandbox; tokens
follow from the conversation and the files alone, so a template has no clock. Not finding where an
answer begins and ends is a bad sample, never a wrong mask.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np

from meshd.transform.assets import BadAssetError, asset, optional_asset
from meshd.transform.builtin.text import MAX_TEXT_BYTES, check_bytes, text_of
from meshd.transform.builtin.token_sequences import load_tokenizer, token_dtype
from meshd.transform.errors import BadSampleError, MissingLibraryError
from meshd.transform.op_types import FieldType
from meshd.transform.parameters import Parameter, choice, flag
from meshd.transform.registry import operation

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from meshd.transform.assets import Asset
    from meshwire.plan.keyed_random import KeyedRandom

Span = tuple[int, int]
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_MARK = "generation"


@cache
def _environment() -> tuple[Any, Any]:
    """Return Jinja's environment, set up as transformers does it, and its extension that notes places.

    Raises MissingLibraryError.
    """
    try:
        import jinja2
        import jinja2.ext
        import jinja2.sandbox
    except ImportError as error:
        raise MissingLibraryError("jinja2", "chat") from error

    class Generation(jinja2.ext.Extension):
        """The block `{% generation %}`, whose places in the text are written to `spans` while it is set."""

        tags = {_MARK}  # noqa: RUF012  # Jinja's own type
        pieces: tuple[list[str], list[Span]] | None = None

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("_note_text")
            return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _note_text(self, caller: Callable[[], str]) -> str:
            text = caller()
            if self.pieces is not None:
                before, spans = self.pieces
                start = sum(map(len, before))
                spans.append((start, start + len(text)))
            return text

    made = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    def refuse(message: object) -> None:
        raise jinja2.exceptions.TemplateError(str(message))

    made.filters["tojson"] = to_json
    made.globals["raise_exception"] = refuse
    return made, next(each for each in made.extensions.values() if isinstance(each, Generation))


class ChatTemplate(msgspec.Struct, frozen=True):
    """A template with the special tokens that it may use. `marks`: whether it has `{% generation %}`."""

    compiled: Any
    tokens: dict[str, str]
    marks: bool

    def render(self, conversation: dict[str, Any], *, prompt: bool = False) -> tuple[str, list[Span]]:
        """Return the text, and the places of its `{% generation %}` blocks. Raises BadSampleError."""
        (_, tracker), pieces = _environment(), list[str]()
        spans: list[Span] = []
        values = {"tools": None, "documents": None, **self.tokens, **conversation}
        tracker.pieces, size = (pieces, spans), 0
        try:
            for piece in self.compiled.generate(values, add_generation_prompt=prompt):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_TEXT_BYTES:
                    break
        except MemoryError:
            raise
        except Exception as error:  # the template is a program: it can fail in any way on a conversation
            raise BadSampleError(f"the template refuses it: {type(error).__name__}: {error}") from None
        finally:
            tracker.pieces = None
        if size > MAX_TEXT_BYTES:
            raise BadSampleError(f"the template renders more than {MAX_TEXT_BYTES} characters")
        return "".join(pieces), spans

    def answers(self, conversation: dict[str, Any]) -> tuple[str, list[Span]]:
        """Return the text, and the ranges of it that the assistant wrote. Raises BadSampleError.

        Without `{% generation %}` blocks, an answer is what its message adds to the text of those before it
        with the prompt for an answer.
        """
        text, spans = self.render(conversation)
        if self.marks:
            return text, spans
        messages = conversation["messages"]
        for number, message in enumerate(messages):
            if not isinstance(message, dict) or message.get("role") != "assistant":
                continue
            before, _ = self.render({**conversation, "messages": messages[:number]}, prompt=True)
            whole, _ = self.render({**conversation, "messages": messages[: number + 1]})
            if not whole.startswith(before) or not text.startswith(whole):
                raise BadSampleError(
                    f"answer {number} cannot be found: the template renders earlier messages differently if "
                    "others follow; mark answers in it with {% generation %}"
                )
            spans.append((len(before), len(whole)))
        return text, spans


@lru_cache(maxsize=8)
def _load_template(config: Asset | None, template: Asset | None) -> ChatTemplate:
    """Raises BadAssetError."""
    settings: Any = {}
    if config is not None:
        try:
            settings = json.loads(config.data)
        except ValueError as error:
            raise BadAssetError("config", f"not a tokenizer_config.json: {error}") from None
        if not isinstance(settings, dict):
            raise BadAssetError("config", "not a tokenizer_config.json, which is an object")
    text = _template_text(settings, template)
    tokens = {}
    for name in _SPECIAL:
        given = settings.get(name)
        content = given.get("content") if isinstance(given, dict) else given
        if isinstance(content, str):
            tokens[name] = content
    environment, _ = _environment()
    try:
        compiled = environment.from_string(text)
    except Exception as error:  # besides syntax errors, the compiler's own
        where = "config" if template is None else "template"
        raise BadAssetError(where, f"not a chat template: {type(error).__name__}: {error}") from None
    marks = any(kind == "name" and value == _MARK for _, kind, value in environment.lex(text))
    return ChatTemplate(compiled, tokens, marks)


def _template_text(settings: dict[str, Any], template: Asset | None) -> str:
    if template is not None:
        try:
            return template.data.decode()
        except UnicodeDecodeError as error:
            raise BadAssetError("template", f"not UTF-8 text: {error}") from None
    found = settings.get("chat_template")
    if isinstance(found, list):
        named = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}
        found = named.get("default")
    if not isinstance(found, str):
        raise BadAssetError("config", "it has no chat_template; pass template=s3://…/chat_template.jinja")
    return found


def _conversation(value: bytes) -> dict[str, Any]:
    """Return {"messages": […], …} of a JSON document. Raises BadSampleError."""
    try:
        document = json.loads(text_of(value))
    except (ValueError, RecursionError) as error:
        raise BadSampleError(f"not a JSON document: {error}") from None
    given = {"messages": document} if isinstance(document, list) else document
    if not isinstance(given, dict) or not isinstance(given.get("messages"), list):
        found = given.items() if isinstance(given, dict) else ()
        name = next((name for name, value in found if isinstance(value, list)), None)
        hint = f"; before it, ops.json(FIELD, {name!r}, type='json') takes this list" if name else ""
        raise BadSampleError(f"not a list of messages, and no object with `messages`{hint}")
    return {name: given[name] for name in ("messages", "tools", "documents") if name in given}


@operation(
    "tokenize_chat",
    Parameter("file", asset),
    Parameter("config", optional_asset, None),
    Parameter("template", optional_asset, None),
    Parameter("output", choice("tokens", "answer_mask"), "tokens"),
    Parameter("prompt", flag, False),
    Parameter("dtype", choice("auto", "uint16", "uint32", "int32", "int64"), "auto"),
    takes="bytes of a JSON document: a list of messages, or an object with `messages` and perhaps `tools`",
    gives='tokens [n] of `dtype` as in `tokenize`; with `output` "answer_mask", uint8 [n]: 1 for tokens of '
    "answers",
    refuses="not such a document; a conversation that the template refuses; over 16 Mi characters; answers "
    "that cannot be found",
)
@dataclass(frozen=True, slots=True)
class TokenizeChat:
    """Token ids of a conversation, rendered by the chat template of a model as Hugging Face's
    `apply_chat_template` does: `config` is its `tokenizer_config.json`, `template` its
    `chat_template.jinja` if that is a file of its own. A second field of the same file, with `output`
    "answer_mask", tells which tokens the assistant says, for the loss. `prompt` appends the prompt for an
    answer."""

    file: Asset
    config: Asset | None
    template: Asset | None
    output: Literal["tokens", "answer_mask"]
    prompt: bool
    dtype: str
    _tokenizer: Any = field(init=False, repr=False, compare=False)
    _template: ChatTemplate = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        tokenizer = load_tokenizer(self.file)
        object.__setattr__(self, "_tokenizer", tokenizer)
        object.__setattr__(self, "_template", _load_template(self.config, self.template))
        object.__setattr__(self, "dtype", token_dtype(tokenizer, self.dtype))

    def infer(self, field: FieldType) -> FieldType:
        check_bytes(field)
        if self.prompt and self.output == "answer_mask":
            raise ValueError("a mask of answers has no prompt for another one")
        return FieldType("array", self.dtype if self.output == "tokens" else "uint8", (None,))

    def apply(self, value: bytes, random: KeyedRandom) -> npt.NDArray[Any]:
        conversation = _conversation(value)
        if self.output == "tokens":
            text, _ = self._template.render(conversation, prompt=self.prompt)
            return np.array(self._encode(text).ids, self.dtype)
        text, spans = self._template.answers(conversation)
        encoded = self._encode(text)
        mask = np.zeros(len(encoded.ids), np.uint8)
        for start, end in spans:
            if start < end:
                first, last = encoded.char_to_token(start), encoded.char_to_token(end - 1)
                if first is None or last is None:
                    raise BadSampleError("an answer begins or ends with what the tokenizer drops")
                mask[first : last + 1] = 1
        return mask

    def _encode(self, text: str) -> Any:
        try:
            return self._tokenizer.encode(text, add_special_tokens=False)
        except BaseException as error:  # a panic of the library is not an Exception
            if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
                raise
            raise BadSampleError(f"the tokenizer refuses the text: {error}") from None
