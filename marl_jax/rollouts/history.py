"""Token-in, token-out: the chat template is rendered once, for a first turn; later turns only append.

    first turn   template(messages)
    later turn   previous prompt + completion + (end of turn, if it was cut) + the template's text for the new message

So each prompt begins with the previous prompt and completion to the token. (With a template that rewrites earlier
turns, as Qwen3's does with their thinking, it would not: the rewriting is left out on purpose.) Texts never
become control tokens: "<|im_end|>" in a message is spelled out in ordinary tokens.
"""

import functools
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from marl_jax.workflows.api import Message

OPENING = {"role": "user", "content": "opening words"}
REPLY = {"role": "assistant", "content": "a reply to take apart"}
NEXT = {"role": "user", "content": "words that follow"}
EARLIER = [{"role": "user", "content": "first words"}, {"role": "assistant", "content": "a first reply"}]

# Qwen3's marks of thoughts, tools and files are added tokens, but not special ones.
_MARK = re.compile(r"</?[a-z_]+>|<\|[^<>]*\|>")
_THOUGHT = "<think>", "</think>"

LONGER = "raise max_prompt (and the limits' context, if set)"


class Ended(ValueError):
    """The episode cannot continue; the text is its complete error."""


class Overlong(Ended):
    """A prompt does not fit into the context."""


class Unrendered(Ended):
    """The chat template refuses messages, such as a system message."""


class Chat:
    """A tokenizer with a chat template, seen as two functions: how a history starts and how it continues."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        added = [token for token in tokenizer.added_tokens_decoder.values() if len(token.content) > 1]
        special_words = [token.content for token in added if token.special]
        control = _any_of(
            [token.content for token in added if token.special or _MARK.fullmatch(token.content)]
        )
        self._inside_control = re.compile(f"(?=(?:{control}))(.)", re.DOTALL)
        self._starts = functools.lru_cache(4096)(self._start)  # samples of a task share their first prompts
        tail = self._tail([NEXT])
        match = re.match(_any_of(special_words), tail) if special_words else None
        if match is None:
            raise ValueError(
                f"the chat template closes an assistant turn with {tail[:20]!r}, which is no control token: "
                "histories cannot be continued token by token"
            )
        self.end_text = match[0]
        self.end_of_turn = int(tokenizer.convert_tokens_to_ids(self.end_text))
        if NEXT["content"] not in tail or tail != self._tail([NEXT], EARLIER):
            raise ValueError(
                "the chat template writes a later turn differently after other earlier turns: "
                "histories cannot be continued token by token"
            )
        opened, closed = (self._render([OPENING]).rfind(mark) for mark in _THOUGHT)
        if opened > closed:
            raise ValueError(
                "the chat template begins every answer with a thought, even with thinking off: use a model that "
                "can answer without"
            )

    def start(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The prompt of a first turn."""
        return self._starts(tuple((message["role"], message["content"]) for message in messages))

    def extend(self, completion: Sequence[int], messages: Sequence[Message]) -> tuple[int, ...]:
        """The tokens to append to prompt + completion, so that `messages` follow and the assistant speaks next."""
        closed = bool(completion) and completion[-1] == self.end_of_turn
        return (() if closed else (self.end_of_turn,)) + self._encode(messages, after=True)

    def spell(self, text: str) -> list[int]:
        """The tokens of a text outside of the template."""
        cuts = (match.end() for match in self._inside_control.finditer(text))
        return [
            token
            for start, end in itertools.pairwise((0, *cuts, len(text)))
            for token in self._ids(text[start:end])
        ]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones left out."""
        return self.tokenizer.decode(
            list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def texts(self, messages: Sequence[Message], after: bool = False) -> list[str]:
        """The rendered template, split inside each control word that a message spells; parts are encoded separately."""
        contents = [message["content"] for message in messages]
        mark = next(chr(code) for code in range(0xE000, 0xF8FF) if not any(chr(code) in c for c in contents))
        split = functools.partial(self._inside_control.sub, rf"\1{mark}")
        safe = [{**message, "content": split(message["content"])} for message in messages]
        text = self._tail(safe)[len(self.end_text) :] if after else self._render(safe)
        return text.split(mark)

    def _start(self, messages: tuple[tuple[str, str], ...]) -> tuple[int, ...]:
        return self._encode([{"role": role, "content": content} for role, content in messages])

    def _encode(self, messages: Sequence[Message], after: bool = False) -> tuple[int, ...]:
        return tuple(token for text in self.texts(messages, after) for token in self._ids(text))

    def _ids(self, text: str) -> list[int]:
        readable = text.encode("utf-8", "replace").decode()  # half a surrogate pair becomes a question mark
        return self.tokenizer.encode(readable, add_special_tokens=False) if text else []

    def _tail(self, messages: Sequence[Message], before: Sequence[Message] = ()) -> str:
        """The template's text after the content of an assistant message."""
        return self._render([*before, OPENING, REPLY, *messages]).partition(REPLY["content"])[2]

    def _render(self, messages: Sequence[Message]) -> str:
        import jinja2

        try:
            return self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True, enable_thinking=False
            )
        except (jinja2.TemplateError, TypeError) as error:
            name = getattr(self.tokenizer, "name_or_path", "")
            raise Unrendered(
                f"the chat template of the tokenizer '{name}' cannot be rendered: {error}"
            ) from None


def _any_of(words: Sequence[str]) -> str:
    """The expression that matches each of the words, the longest first."""
    return "|".join(map(re.escape, sorted(words, key=len, reverse=True)))


class Chats:
    """The chat of every call: that of the policy which answers it."""

    def __init__(self, tokenizer: Any | Mapping[str, Any], policy_map: Mapping[str, str]):
        """One tokenizer for all policies, or {policy: tokenizer}; policies with the same one share a chat."""
        names = dict.fromkeys(policy_map.values())
        if not isinstance(tokenizer, Mapping):
            tokenizer = dict.fromkeys(names or ("",), tokenizer)
        if missing := [name for name in names if name not in tokenizer]:
            raise ValueError(
                f"policy '{missing[0]}' has no tokenizer; these policies have one: {', '.join(tokenizer)}"
            )
        chats = {id(each): Chat(each) for each in {id(each): each for each in tokenizer.values()}.values()}
        self.by_policy = {name: chats[id(each)] for name, each in tokenizer.items()}
        self._map = dict(policy_map)

    def of(self, role: str, slot: int = 0) -> Chat:
        """A slot without a policy gets any chat: its call is refused when it is submitted."""
        policy = self._map.get(f"{role}/{slot}", self._map.get(role))
        return self.by_policy.get(policy) or next(iter(self.by_policy.values()))  # type: ignore[arg-type]


def fit(
    messages: Sequence[Message],
    render: Callable[[Sequence[Message]], tuple[int, ...]],
    room: float,
    truncate: bool,
) -> tuple[tuple[int, ...], int]:
    """Tokens of the messages, at most `room` of them, and the number cut from the middle of the longest one."""
    tokens = render(messages)
    full, cut = len(tokens), 0
    longest = max(range(len(messages)), key=lambda i: len(messages[i]["content"]))
    text = messages[longest]["content"]
    while len(tokens) > room:
        if not truncate:
            raise Overlong(
                f"the prompt adds {full} tokens and only {max(room, 0)} fit: {LONGER}, or set "
                "overlong=truncate in the limits"
            )
        cut += math.ceil((len(tokens) - room) * len(text) / full)  # characters; repeated if they were too few
        keep = len(text) - cut
        if keep < 2:
            raise Overlong(f"even without its longest message the prompt does not fit: {LONGER}")
        short = {**messages[longest], "content": text[: keep // 2] + text[-(keep - keep // 2) :]}
        tokens = render([*messages[:longest], short, *messages[longest + 1 :]])
    return tokens, full - len(tokens)
