"""Check that the texts users read are written in the field's words: `python tools/check_words.py [PATH ...]`.

Read are the string constants of the package (f-strings with `{}` where a value goes), the docstrings that become help
(functions of command modules) or library documentation (what distdiag/__init__.py exports), the strings of
knowledge/*.toml that are not patterns, and README.md, CHANGELOG.md and docs/. A phrase that matches is printed as
file:line, and the exit status is 1. ALLOWED holds what may stay, each with its reason.

Docstrings and comments of the package and the tests are counted against VOICE, phrases of translated English. Each folder has a
budget of such phrases in 10,000 words, which may only fall.
"""

import ast
import io
import re
import sys
import tokenize
import tomllib
from collections.abc import Container, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# Each pattern with its replacement.
WORDS = {
    r"\b(?:this|that|such|each|every|which|another|other|own|new|first|last|only|same|wrong|right|any|no|a|the) ones?\b(?!-|\s+of\b)": "name the thing",
    r"(?<!torch\.)\bones\b|\bone (?:that|who|which|is|was|has|does|cannot|can|may|must)\b": "name the thing",
    r"\b(?:is|are|was|were|be|been|not|it|nothing) told\b|\btold (?:of|by|apart|anything|nothing|its|it|so)\b|\bto tell\b(?! (?:whether|which))": "reported, known, unknown",
    r"\btells?\b(?! (?:NCCL|torch|Gloo|the kernel|the compiler))|\btelling\b": "says, shows, reports",
    r"\bmend(?:s|ed|ing)?\b": "fix",
    r"\bodd\b": "stuck, different, outlier",
    r"\blook(?:s|ed|ing)? (?:at each|like that|longer|in vain|apart)\b|\b(?:in|after|between|of) (?:\w+ )?looks\b|\b(?:one|two|second|first|last|{}) looks?\b": "sample",
    r"\b(?:a|the|no|any|what) ways? (?:to|of|in|out)\b|\bways between\b": "path, option, how to",
    r"\bsomebody\b|\bsomeone\b|\bnobody\b|\beverybody\b|\bwhom\b": "name who",
    r"\bby (?:itself|themselves)\b": "on its own, automatically",
    r"\bstands? (?:in|at|on|still|here|there|for|alone|beside|before|behind|below|above|where)\b|\bstanding\b|\bstood\b": "is, is blocked in",
    r"\bmakes? (?:a|the|no) faults?\b|\bmade (?:a|the|no) fault\b": "inject, cause",
    r"\bin vain\b": "without success",
    r"\bthe other way r?ound\b|\bother way about\b": "the reverse direction",
    r"\bcome (?:any )?further\b|\bcame (?:any )?(?:further|far)\b|\bcomes? far\b": "got stuck in, got past",
    r"\bgood for one\b|\bgood for (?:nothing|\{\})\b": "valid for",
    r"\bis said\b|\bare said\b|\bsaid so\b|\bwas said\b|\bsaid nothing\b|\bsays nothing of\b": "reported",
    r"\bcannot be had\b|\bto be had\b|\bwas had\b": "not available",
    r"\bat all times\b|\bas far as can be seen\b|\bso far as\b": "state the limit of the observation",
    r"\bit is so\b|\bare so\b|\bso it is\b|\bis so\b": "state it",
    r"\bwent away\b|\bis away\b|\bgone away\b": "lost contact, exited",
    r"\bwent wrong\b": "failed",
    r"\bof its own accord\b|\bof theirs?\b|\bof ours?\b|\bnot ours\b": "whose",
    r"\blet(?:s|ting)? (?:it|them|him) go\b": "resume, release",
    r"\bgiv(?:e|es) it (?:longer|more time)\b": "increase --timeout",
    r"\btakes? (?:it )?for\b|\bis taken for\b|\btaken from it\b": "assumed to be",
    r"\bis (?:a )?nothing\b|\bof nothing\b": "empty, zero",
    r"\botherwise than\b": "differently from",
    r"\bthere is no such\b": "does not exist, unknown",
    r"\bbrought (?:to|up|down|in)\b|\bwas brought\b": "copied, sent",
    r"\bthe greatest\b|\bgreatest\b": "largest, maximum",
    r"\bneighbours? in\b": "adjacent",
    r"\bwhat (?:mends|is wrong with it)\b": "fix",
    r"\bbelongs to another\b": "another user's",
    r"\bwant(?:s|ed)\b": "needs, requests, expects",
    r"\bhear(?:s|d)? (?:of|from|nothing)\b": "received",
    r"\bspeaks?\b|\bspoke\b|\bspoken\b": "uses, supports, sent",
    r"\bmay not be\b(?= (?:read|used|opened|traced|seen))": "permission denied",
    r"\bunasked\b|\bunwished\b|\bwished\b|\bwish(?:es)?\b": "requested",
    r"\bfor good\b": "permanently",
    r"\bnames (?:the|which|what|who|its|their)\b": "shows, finds, has",
    r"\b(?:accus(?:e|es|ed|ing)|blam(?:e|es|ed|ing)|guilty)\b": "at fault, reported, identified",
    r"(?:^|[.;:] )(?-i:Of) (?:a|an|each|all|the|two|several|its|these|those) ": "subject first",
    r"\b(?:listed|shown|printed|put|look\w*) beside\b|\bbeside (?:it|them|that|this|these|those|each)\b": "next to, with",
    r"\bthat (?:\w+ ){1,5}that (?:is|are|has|have|was|were|do|does|may|can)\b": "one fact per sentence",
    r"\bat an end\b|\bcame to (?:its|an) end\b|\bcomes to (?:its|an) end\b": "ended",
}
COMPILED = [(re.compile(pattern, re.IGNORECASE), instead) for pattern, instead in WORDS.items()]

NOT_TEXTS = {"pattern", "words", "source", "example", "name", "names"}
"""Keys of TOML whose strings are compared with logs or name a source: others wrote them."""

# (part of a path, part of the text): why it may stay.
ALLOWED: dict[tuple[str, str], str] = {
    ("diagnosis/stuck/types.py", "cannot tell"): "one of the four verdicts of a source",
    ("docs/commands/hang.md", "cannot tell"): "one of the four verdicts of a source",
    ("docs/reference/json-data.md", "accused"): "a field of the JSON document",
}


def visible_strings(source: str, docstrings: Container[str] | bool) -> Iterator[tuple[int, str]]:
    """List line and text of the strings of a module that a user may read.

    `docstrings`: the functions and classes whose docstrings count; True: all of them. The notes below attributes and
    the docstring of the module itself are for who reads the code.
    """
    tree = ast.parse(source)
    docs = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    docs -= {id(node.body[0].value) for node in _documented(tree, docstrings) if _has_docstring(node)}  # type: ignore[attr-defined]
    inside: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            inside.update(id(part) for part in ast.walk(node) if part is not node)
            yield (
                node.lineno,
                "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values),
            )
        elif isinstance(node, ast.Constant) and id(node) not in inside | docs and " " in str(node.value).strip():
            yield node.lineno, str(node.value)


def _documented(tree: ast.Module, names: Container[str] | bool) -> Iterator[ast.AST]:
    """List the functions and classes of these names, and the public methods of the classes."""
    for node in ast.walk(tree) if names is True else tree.body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or names is False:
            continue
        if names is True or node.name in names:
            yield node
            yield from (part for part in node.body if isinstance(part, ast.FunctionDef) and part.name[0] != "_")


def exported() -> set[str]:
    """List what scripts import from distdiag."""
    tree = ast.parse((ROOT / "distdiag" / "__init__.py").read_text("utf-8"))
    lists = (
        node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    return {name for names in lists for name in ast.literal_eval(names)}


def _has_docstring(node: ast.AST) -> bool:
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or not node.body:
        return False
    first = node.body[0]
    return isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)


def toml_strings(text: str) -> Iterator[tuple[int, str]]:
    """List the strings of a TOML file; the line is that of the first place where the string's first words stand."""

    def walk(value: object) -> Iterator[str]:
        if isinstance(value, str):
            yield re.sub(r"\{\w+\}", "{}", value)
        elif isinstance(value, dict):
            for key, inner in value.items():
                if key not in NOT_TEXTS:
                    yield from walk(inner)
        elif isinstance(value, list):
            for inner in value:
                yield from walk(inner)

    for string in walk(tomllib.loads(text)):
        at = text.find(string.partition("{")[0][:20] or string)
        yield text.count("\n", 0, max(at, 0)) + 1, string


def texts_of(path: Path) -> Iterator[tuple[int, str]]:
    """List line and text of a file's user-visible texts."""
    text = path.read_text(errors="replace")
    if path.suffix == ".py":
        is_command = path.name in ("command.py", "commands.py", "cli.py")
        yield from visible_strings(text, is_command or (exported() if "training" in path.parts else False))
    elif path.suffix == ".toml":
        yield from toml_strings(text)
    else:
        # A name in braces is a placeholder in a title of a finding.
        yield from ((number, re.sub(r"\{\w+\}", "{}", line)) for number, line in enumerate(text.splitlines(), 1))


def files_below(paths: list[Path]) -> list[Path]:
    """List the files to read below these paths, sorted."""
    found = {path for path in paths if path.is_file()}
    for path in paths:
        for suffix in ("*.py", "*.toml", "*.md"):
            found.update(path.rglob(suffix))
    return sorted(found)


VOICE = re.compile(
    r"\b(?:of|from|by|in|on|for|with|to|as|is|than|and|or|that) what\b|\bwhat (?:is|are|was|has|have|may|can|it|they)\b"
    r"|\b(?:those|these|this|one|ones) (?:that|who|which)\b|, (?:that|who) (?:is|are|has)\b"
    r"|\b(?:comes?|came|goes|went|tells?|told|says?|said|speaks?|hears?|heard) (?:to|of|by|from|so|that|back|out|in)\b"
    r"|\b(?:nobody|everybody|somebody|whoever|whatever|whom)\b|\bwhat (?:there )?is there\b|\bis there\b"
    r"|\bso (?:many|long|much) (?:as|that|of)?\b|\bstands? (?:in|for|here|at)\b|\blies? (?:in|on|at|beside)\b",
    re.IGNORECASE,
)
BUDGETS = {
    **{".": 10, "agent": 6, "cluster": 7, "commands": 5, "diagnosis": 9, "facts": 9, "jobs": 14, "knowledge": 9},
    **{"launch": 5, "pages": 0, "training": 9},
}
"""Phrases of VOICE in 10,000 words of docstrings and comments, by folder of the package."""
TEST_BUDGETS = {".": 40, "benchmarks": 28, "integration": 14, "programs": 15, "samples": 0, "stacks": 55, "unit": 20}
"""The same for the tests."""


def sentences(text: str) -> Iterator[str]:
    """List the docstrings and comments of a module."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, documented) and (words := ast.get_docstring(node)):
            yield words
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and not re.match(r"# (?:noqa|type:|fmt:)", token.string):
            yield token.string


def over_budget(package: Path, budgets: dict[str, int]) -> Iterator[str]:
    """List the folders below `package` with more phrases of VOICE than their budget."""
    for folder, budget in budgets.items():
        files = package.glob("*.py") if folder == "." else (package / folder).rglob("*.py")
        texts = [words for file in files for words in sentences(file.read_text())]
        words, hits = (sum(len(found) for found in map(each, texts)) for each in (str.split, VOICE.findall))
        if (share := round(10_000 * hits / max(1, words))) > budget:
            yield f"{package.name}/{folder}: {share} phrases of translated English in 10,000 words, budget {budget}"


def problems(path: Path) -> Iterator[str]:
    """List the phrases of this file that are not field English."""
    name = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
    for line, text in texts_of(path):
        flat = " ".join(text.split())
        for pattern, instead in COMPILED:
            for match in pattern.finditer(flat):
                around = flat[max(0, match.start() - 40) : match.end() + 40]
                if not any(part in name and allowed in flat for part, allowed in ALLOWED):
                    yield f"{name}:{line}: {match[0]!r} ({instead}): …{around}…"


def main() -> None:
    """Print the findings for the given paths, or for all."""
    paths = [Path(name).resolve() for name in sys.argv[1:]] or [
        ROOT / name for name in ("distdiag", "README.md", "CHANGELOG.md", "docs")
    ]
    found = [problem for path in files_below(paths) for problem in problems(path)]
    if not sys.argv[1:]:
        found += [*over_budget(ROOT / "distdiag", BUDGETS), *over_budget(ROOT / "tests", TEST_BUDGETS)]
    for problem in found:
        sys.stdout.write(f"{problem}\n")
    if found:
        sys.exit(
            f"{len(found)} phrases to reword (ALLOWED in {Path(__file__).name} holds what may stay, with its reason)"
        )


if __name__ == "__main__":
    main()
