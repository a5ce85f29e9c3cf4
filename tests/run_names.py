"""The names that docs/metrics.md has for what stands in a run's lines."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"


def undocumented(file, line):
    """The names in a line of metrics.jsonl or eval.jsonl that the page has not."""
    table = PAGE.read_text().partition(f"## {file}")[2].partition("\n## ")[0]
    rows = [
        (_quoted(names), _quoted(told))
        for names, told in re.findall(r"^\| (`.*?) \| (.*) \|$", table, re.MULTILINE)
    ]
    known, inside = [], {}
    for names, told in rows:
        for name in names:
            # NAME is one of those that the row goes on to tell, other capital words are any name.
            last = f"(?:{'|'.join(map(re.escape, told))})"
            known.append(
                re.sub("[A-Z]+", lambda word, last=last: last if word[0] == "NAME" else "[^/]+", name)
            )
            inside[name] = told
    found = [name for name in line if not any(re.fullmatch(of, _of_roles(name)) for of in known)]
    for role, told in (line.get("roles") or {}).items():
        found += [f"roles: {role}: {name}" for name in told if name not in inside["roles"]]
    return found + [name for name in line.get("difference") or () if name not in inside["difference"]]


def _quoted(text):
    return re.findall(r"`(.+?)`", text)


def _of_roles(name):
    """The name that a number of slots has where roles are kept apart."""
    name = re.sub(r"^(gradient/[^/]+)/slots/[^/]+/", r"\1/", name)
    return re.sub(r"^(gradient/[^/]+/(?:weight|layers)/[^/]+)/\d+(?=$|/[^/]+(?:/\d+)?$)", r"\1", name)
