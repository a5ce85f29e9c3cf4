"""Prompts: one Markdown file per role, in one folder per task family, filled field by field.

A file has sections (`## name`). `prompts.critic(text=...)` gives the system message and the section `user`,
`prompts.critic.again(text=...)` one user message from the section `again`. A field is written in double braces;
a list is rendered item by item through the section that has its name ({{number}}, {{text}}).
The value of a field is a text, a number, a completion, or a list of these.
"""

import dataclasses
import functools
import hashlib
import numbers
import os
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from marl_jax.workflows.api import Completion

Messages = list[dict[str, str]]

FOLDER = pathlib.Path(__file__).parent / "prompts"
FIELD = re.compile(r"\{\{(\w+)\}\}")
ITEM = {"number", "text"}  # fields of a section that renders one item of a list
SECTION = re.compile(r"^## (\w+)[ \t]*$\n?", re.MULTILINE)


def load_prompts(family: str, size: str = "full", folder: str | pathlib.Path = FOLDER) -> "Prompts":
    """The prompts of a task family ("math", "code") at a size ("full", "micro"), or of your own folder."""
    folder = pathlib.Path(os.path.expanduser(folder))
    path = folder / (family if size == "full" else f"{family}_{size}")
    files = sorted(path.glob("*.md"))
    if not files:
        known = ", ".join(sorted(p.name for p in folder.glob("*/"))) or "no folder"
        raise ValueError(f"no prompt files in '{path}'; there is: {known}")
    if taken := [file.name for file in files if file.stem in {"files", *vars(Prompts)}]:
        raise ValueError(
            f"prompt file '{taken[0]}' in '{path}' has a name that no role can have: rename the role"
        )
    return Prompts({file.stem: _read(file) for file in files})


def _read(file: pathlib.Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"prompt file '{file}' is not UTF-8 ({error.reason}): save it as UTF-8") from None


@dataclasses.dataclass(frozen=True)
class Prompts:
    """{role: text of its file}; `prompts.role` renders."""

    files: Mapping[str, str]  # {role: text}

    def __getattr__(self, role: str) -> "RolePrompt":
        if role.startswith("__"):  # requested by copy and pickle, before `files` is set
            raise AttributeError(role)
        if role not in self.files:
            raise AttributeError(f"no prompt file for role '{role}'; there is: {', '.join(self.files)}")
        return RolePrompt(role, sections(self.files[role], role))

    def digest(self) -> str:
        """A digest of all files."""
        parts = [part for role in sorted(self.files) for part in (role, self.files[role])]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()


@dataclasses.dataclass(frozen=True)
class RolePrompt:
    """The sections of one role's prompt file."""

    role: str  # name of the role
    sections: Mapping[str, str]  # {name: text below its heading}

    def __call__(self, **fields: Any) -> Messages:
        """The messages of a first turn: system, if the file has such a section, and user."""
        return self.system() + self.user(**fields)

    def system(self) -> Messages:
        """The system message, if the file has one."""
        text = self.sections.get("system", "")
        if field := FIELD.search(text):
            raise ValueError(
                f"prompt '{self.role}.system' has {field[0]}, and a system message has no fields: put it into '## user'"
            )
        return [{"role": "system", "content": text}] if text else []

    def __getattr__(self, section: str) -> Callable[..., Messages]:
        if section.startswith("__"):
            raise AttributeError(section)
        if section not in self.sections:
            known = ", ".join(self.sections)
            raise AttributeError(f"prompt of '{self.role}' has no section '{section}'; it has: {known}")
        where = f"prompt '{self.role}.{section}'"
        return lambda **fields: [{"role": "user", "content": self._fill(section, fields, where)}]

    def _fill(self, section: str, fields: Mapping[str, Any], where: str) -> str:
        values = {name: self._text(name, value, where) for name, value in fields.items()}
        return fill(self.sections[section], values, where)

    def _text(self, name: str, value: Any, where: str) -> str:
        if isinstance(value, str) or not isinstance(value, Sequence):
            text = _plain(value, name, where)
            if ITEM >= set(FIELD.findall(self.sections.get(name, ""))) > set():
                raise ValueError(
                    f"{where}: field '{name}' is {_kind(value)}, and '## {name}' renders the items of a list: "
                    "give a list"
                )
            return text
        if name not in self.sections:
            raise ValueError(f"{where}: field '{name}' is a list, so the file needs a section '## {name}'")
        texts = [_plain(item, name, where) for item in value]
        numbered = "number" in FIELD.findall(self.sections[name])  # a section may leave it out
        items = [{"text": text} | ({"number": str(i)} if numbered else {}) for i, text in enumerate(texts, 1)]
        gap = "\n\n" if "\n" in self.sections[name] else "\n"
        return gap.join(fill(self.sections[name], item, f"{where}, item of '{name}'") for item in items)


def fill(template: str, fields: Mapping[str, str], where: str) -> str:
    """Replace each field of the template by its value; every field of the template, and no other, must be given."""
    in_template = set(FIELD.findall(template))
    if missing := sorted(in_template - set(fields)):
        raise ValueError(f"{where} needs the field '{missing[0]}'")
    if unused := sorted(set(fields) - in_template):
        raise ValueError(
            f"{where} has no place for the field '{unused[0]}', written {{{{{unused[0]}}}}}; it has: "
            f"{', '.join(sorted(in_template)) or 'none'}"
        )
    return FIELD.sub(lambda match: fields[match[1]], template)


def _plain(value: Any, name: str, where: str) -> str:
    if value is None:
        raise ValueError(
            f"{where}: field '{name}' is None: give a text, or a completion instead of its answer"
        )
    if not isinstance(value, str | Completion | numbers.Real):
        raise ValueError(
            f"{where}: field '{name}' holds {_kind(value)}, {value!r:.60}: give a text, a number or a completion, or a "
            "list of these"
        )
    return str(value)


def _kind(value: Any) -> str:
    return "a text" if isinstance(value, str) else f"a {type(value).__name__}"


@functools.lru_cache(maxsize=256)
def sections(text: str, role: str) -> dict[str, str]:
    """Split a file at its `## name` lines."""
    _, *parts = SECTION.split(text)
    names, bodies = parts[::2], [body.strip("\n") for body in parts[1::2]]
    if "user" not in names or len(set(names)) != len(names):
        raise ValueError(
            f"prompt file of '{role}' needs a section '## user', and each section once; found {names}"
        )
    return dict(zip(names, bodies))
