"""Checks for `make quality` that few sentences are hard to read, and that few variables have names without a meaning,
and that no private word stands for a term of the field (`private_words.toml`).

    python -m tests.repository.plain_words      the places, and the counts beside their ceilings

CONTRIBUTING.md says how to write. The patterns find places to look at; a place may still be plain.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

CEILINGS = {"fragment": 20, "riddle": 40, "long": 20, "where": 40, "variable": 40, "private": 0}
"""Most places of each kind: descriptions that are no noun phrase and no verb, nested clauses, sentences of more than 34
words, "where" in the place of "if", variables whose name says nothing, and private words."""

_OPENERS = re.compile(r"(of|that|what|which|where|as|such|those|who)\b", re.IGNORECASE)
_NESTED = re.compile(
    r"\b(what|which|who|those|such|none|is to|has it|as it is|of its own|so many|thereof|by way of)\b", re.I
)
_CONDITION = re.compile(r"^\s*where\b|, where (there|it|no|they|a|the|that|one)\b", re.IGNORECASE)
_NAMES = {"found", "held", "given", "asked", "sent", "there", "how", "made"}
_PRIVATE = tomllib.loads(Path(__file__).with_name("private_words.toml").read_text())
_SECTION = re.compile(r"\s*(Args|Attributes|Returns|Raises|Yields):\s*$")
_ITEM = re.compile(r"\s+[\w*`., ]{1,60}:\s+(\S.*)$")


def hits(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the kind and the text of each place in a Python or Markdown file."""
    text = path.read_text()
    if path.suffix == ".md":
        prose = re.split(r"\n\s*\n", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
        bodies = [cell for block in prose for cell in _cells(block)]
        code = [name for span in re.findall(r"`[^`]*`", text) for name in re.findall(r"\w+", span)]
    else:
        tree, bodies = ast.parse(text), []
        for node in ast.walk(tree):
            name = node.id if isinstance(node, ast.Name) else getattr(node, "arg", None)
            if isinstance(node, (ast.Name, ast.arg, ast.keyword)) and name in _NAMES:
                yield "variable", str(name)
            documented = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
            if documented and (doc := ast.get_docstring(node)):
                yield from (("fragment", line) for line in _descriptions(doc) if _OPENERS.match(line))
                bodies.append(re.sub(r"(?m)^\s*[\w*`., ]{1,60}:\s+", "", doc))
        tokens = [*tokenize.generate_tokens(io.StringIO(text).readline)]
        bodies += [token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT]
        code = [token.string for token in tokens if token.type == tokenize.NAME]
    for name in code:
        if term := _term_for(name, path):
            yield "private", f"{name}: write {term}"
    for body in bodies:
        for sentence in re.split(r"(?<=[.!?:;])\s+", re.sub(r"`[^`]*`", "x", " ".join(body.split()))):
            words = len(sentence.split())
            if words > 34:
                yield "long", sentence
            if words > 12 and len(_NESTED.findall(sentence)) >= 2:
                yield "riddle", sentence
            if words > 2 and _CONDITION.search(sentence):
                yield "where", sentence


def _term_for(name: str, path: Path) -> str:
    """Return the term of the field in the place of a private word; "" for other names."""
    if name in _PRIVATE["names"]:
        return str(_PRIVATE["names"][name])
    for beginning, term in _PRIVATE["beginnings"].items():
        if name.lstrip("_").startswith(beginning) and name != "most_common":
            return name.replace(beginning, term, 1)
    entry = _PRIVATE["in_files"].get(name, {"files": []})
    places = [f"parallelformers_ng/{file}" for file in entry["files"]]
    return str(entry["term"]) if any(place in path.as_posix() for place in places) else ""


def _cells(block: str) -> list[str]:
    is_table = block.lstrip().startswith("|")
    return [cell for row in block.splitlines() for cell in row.strip("|").split("|")] if is_table else [block]


def _descriptions(doc: str) -> Iterator[str]:
    """Yield the first paragraph of a docstring, and the descriptions in its sections."""
    yield doc.split("\n\n")[0]
    in_section = False
    for line in doc.splitlines():
        if _SECTION.match(line):
            in_section = True
        elif in_section and (item := _ITEM.match(line)):
            yield item[1]


def count(root: Path) -> dict[str, list[str]]:
    """Return the places of each kind in the files of a checkout."""
    places: dict[str, list[str]] = defaultdict(list)
    listed = subprocess.run(["git", "ls-files", "*.py", "*.md"], cwd=root, capture_output=True, text=True, check=True)
    for name in listed.stdout.split():
        if not name.startswith("COVERAGE") and (root / name).exists():
            for kind, text in hits(root / name):
                places[kind].append(f"{name}: {text[:120]}")
    return places


if __name__ == "__main__":
    seen = count(Path())
    over = [kind for kind, most in CEILINGS.items() if len(seen[kind]) > most]
    for kind in over or ([] if sys.argv[1:] != ["--all"] else CEILINGS):
        print(f"\n{kind}:", *seen[kind], sep="\n  ")
    print(", ".join(f"{kind} {len(seen[kind])} of at most {most}" for kind, most in CEILINGS.items()))
    sys.exit(bool(over))
