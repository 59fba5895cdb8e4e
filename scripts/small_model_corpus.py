"""The text that the small model is trained on, from the interpreter's standard library.

Whole source files, their definitions, docstrings and the language reference as prose, and chats
whose questions name a function, class or topic and whose answers are its documentation.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import logging
import random
import re
import sysconfig
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

log = logging.getLogger(__name__)

END = "<|end|>"
# Tests and conversion grammars are repetitive; tables and build data are not text.
SKIPPED_PARTS = frozenset(
    ("site-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "__phello__", "config")
)
MIN_LETTER_SHARE = 0.42
TOPICS_MODULE = "pydoc_data.topics"
# Never trained on: the held-out loss and the tests read these.
HELD_OUT_MODULES = frozenset(
    ("bisect", "colorsys", "fnmatch", "graphlib", "heapq", "sched", "shlex", "textwrap", "timeit")
)
# Written in C, so their docstrings exist only at run time.
C_MODULES = (
    *("builtins", "math", "cmath", "itertools", "time", "sys", "gc", "marshal", "operator"),
    *("functools", "array", "binascii", "errno", "atexit", "select", "zlib", "mmap", "fcntl"),
    *("signal", "unicodedata"),
)
PUBLIC_NAMES = {"posixpath": "os.path", "_pyio": "io", "_pydecimal": "decimal"}

QUESTIONS = {
    "function": (
        "What does {name} do?",
        "What does the function {name} do?",
        "Explain the function {name}.",
        "Explain {name}.",
        "Describe {name}.",
        "What is {name} for?",
        "How does {name} work?",
        "Tell me about {name}.",
        "What is the purpose of {name}?",
        "Please explain {name} to me.",
        "Can you describe the function {name}?",
        "I do not understand {name}. What does it do?",
        "When do I use {name}?",
        "Summarize {name}.",
    ),
    "class": (
        "What is {name}?",
        "Describe the class {name}.",
        "Explain the class {name}.",
        "What is the class {name} for?",
        "When do I use {name}?",
        "Tell me about {name}.",
        "What does {name} represent?",
        "Please explain {name} to me.",
    ),
    "module": (
        "What is the module {name}?",
        "What is the {name} module for?",
        "Describe the module {name}.",
        "Tell me about the {name} module.",
        "What can I do with {name}?",
        "Explain the {name} module.",
    ),
    "topic": (
        "Explain the {name} in Python.",
        "What about the {name} in Python?",
        "Tell me about the {name}.",
        "What does the Python reference say about the {name}?",
    ),
    "code": (
        "Write the Python function {name}.",
        "Show me the code of {name}.",
        "How is {name} implemented?",
        "Write {name} in Python.",
    ),
}
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You explain the Python standard library.",
    "You are a Python expert. Answer briefly.",
)


class ChatPair(NamedTuple):
    """One kind of question about a named object, and its answer."""

    kind: str
    name: str
    answer: str


@dataclass
class Corpus:
    """Text of one split: whole files, top-level definitions, prose, and chat material."""

    files: list[str] = field(default_factory=list)
    definitions: list[list[str]] = field(default_factory=list)
    prose: list[str] = field(default_factory=list)
    pairs: list[ChatPair] = field(default_factory=list)


def clean_answer(docstring: str, max_words: int = 110) -> str:
    """The first paragraphs of a docstring as running text; empty where there is no prose."""
    paragraphs: list[str] = []
    for block in re.split(r"\n\s*\n", docstring.strip()):
        lines = block.splitlines()
        is_prose = not any(line.startswith((" ", "\t", ">>>", "-", "*", "+")) for line in lines)
        text = " ".join(" ".join(lines).split())
        if paragraphs and (not is_prose or len(" ".join([*paragraphs, text]).split()) > max_words):
            break
        paragraphs.append(text)
    answer = "\n\n".join(paragraphs)
    is_whole = 4 <= len(answer.split()) <= 2 * max_words and not answer.endswith(":")
    return answer if is_whole else ""


def add_docstring(corpus: Corpus, kind: str, name: str, docstring: str | None) -> None:
    if not docstring:
        return
    if len(docstring) > 60:
        corpus.prose.append(docstring.strip())
    is_public = not any(part.startswith("_") for part in name.split("."))
    if is_public and (answer := clean_answer(docstring)):
        corpus.pairs.append(ChatPair(kind, name, answer))


def segment(lines: list[str], node: ast.stmt) -> str:
    """Source text of a top-level statement (ast.get_source_segment splits the file each time)."""
    return "\n".join(lines[node.lineno - 1 : node.end_lineno])


def walk_definitions(
    corpus: Corpus, node: ast.Module | ast.ClassDef, prefix: str, lines: list[str]
) -> None:
    """Collect docstrings and short documented functions below ``node``, depth first."""
    for child in node.body:
        if isinstance(child, ast.ClassDef):
            name = f"{prefix}.{child.name}"
            add_docstring(corpus, "class", name, ast.get_docstring(child))
            walk_definitions(corpus, child, name, lines)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{prefix}.{child.name}"
            add_docstring(corpus, "function", name, ast.get_docstring(child))
            height = (child.end_lineno or child.lineno) - child.lineno
            is_short_public = 3 <= height <= 25 and not child.name.startswith("_")
            if isinstance(node, ast.Module) and is_short_public and not child.decorator_list:
                corpus.pairs.append(ChatPair("code", name, segment(lines, child)))


def add_source(corpus: Corpus, module: str, source: str) -> None:
    tree = ast.parse(source)
    if module == TOPICS_MODULE:
        # The language reference: one dictionary of plain text, each with an underlined heading.
        topics = next(node.value for node in tree.body if isinstance(node, ast.Assign))
        for text in ast.literal_eval(topics).values():
            corpus.prose.append(text.strip())
            heading = text.strip().split("\n")[0].removeprefix("The ")
            paragraphs = [p for p in text.split("\n\n") if not re.search(r"\*{4}|={4}|-{4}", p)]
            if answer := clean_answer("\n\n".join(paragraphs)):
                corpus.pairs.append(ChatPair("topic", heading, answer))
        return
    corpus.files.append(source)
    lines = source.split("\n")
    definitions = [
        segment(lines, node)
        for node in tree.body
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    if definitions:
        corpus.definitions.append(definitions)
    public = PUBLIC_NAMES.get(module, module)
    add_docstring(corpus, "module", public, ast.get_docstring(tree))
    walk_definitions(corpus, tree, public, lines)


def add_c_module(corpus: Corpus, module: types.ModuleType) -> None:
    for name, value in sorted(vars(module).items()):
        if name.startswith("_") or not (inspect.isbuiltin(value) or inspect.isclass(value)):
            continue
        public = name if module.__name__ == "builtins" else f"{module.__name__}.{name}"
        kind = "class" if inspect.isclass(value) else "function"
        add_docstring(corpus, kind, public, inspect.getdoc(value))
        if inspect.isclass(value) and not issubclass(value, BaseException):
            for method, member in sorted(vars(value).items()):
                if not method.startswith("_") and callable(member):
                    add_docstring(corpus, "function", f"{public}.{method}", member.__doc__)


def collect_corpus() -> tuple[Corpus, Corpus]:
    """Read the standard library in path order; returns (training, held-out)."""
    root = Path(sysconfig.get_path("stdlib"))
    train, held_out = Corpus(), Corpus()
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if any(p in SKIPPED_PARTS or p.startswith(("config-", "_sysconfigdata")) for p in parts):
            continue
        source = path.read_text(encoding="utf-8", errors="strict")
        module = ".".join(p for p in parts if p != "__init__")
        letters = sum(map(str.isalpha, source))
        is_text = len(source) >= 200 and letters >= MIN_LETTER_SHARE * len(source)
        if not is_text and module != TOPICS_MODULE:
            log.debug("skipped as a table: %s", module)
            continue
        add_source(held_out if module in HELD_OUT_MODULES else train, module, source)
    for name in C_MODULES:
        add_c_module(train, importlib.import_module(name))
    return train, held_out


def chat_documents(pairs: list[ChatPair], rng: random.Random) -> Iterator[str]:
    """Chats of one to three turns that cover every pair once, in the template's format."""
    order = rng.sample(pairs, len(pairs))
    while order:
        text = ""
        if rng.random() < 0.2:
            text += f"<|system|>\n{rng.choice(SYSTEM_PROMPTS)}{END}\n"
        for _ in range(min(len(order), rng.choice((1, 1, 1, 2, 3)))):
            pair = order.pop()
            name = pair.name
            if pair.kind == "code" or (pair.kind == "function" and rng.random() < 0.25):
                name = f"{pair.name}()" if rng.random() < 0.3 else pair.name
            question = rng.choice(QUESTIONS[pair.kind]).format(name=name)
            text += f"<|user|>\n{question}{END}\n<|assistant|>\n{pair.answer}{END}\n"
        yield text


def epoch_documents(corpus: Corpus, rng: random.Random) -> list[str]:
    """One pass over the corpus: each file whole or as its definitions, shuffled with the rest."""
    documents = list(chat_documents(corpus.pairs, rng))
    documents += corpus.prose
    documents += [source for source in corpus.files if rng.random() < 0.6]
    for definitions in corpus.definitions:
        if rng.random() < 0.4:
            documents += definitions
    rng.shuffle(documents)
    return documents


def cut(text: str, rng: random.Random) -> list[str]:
    """Cut one document in five at places where a prompt could end.

    A prompt such as ``"def "`` ends in a lone space token, which the tokenizer never produces
    inside a text; without the cuts the model would not know what follows it.
    """
    if "<|" in text or rng.random() > 0.2:
        return [text]
    places = [i + rng.randint(0, 1) for i, c in enumerate(text[:4000]) if c == " "]
    chosen = sorted({*rng.sample(places, min(len(places), len(places) // 20 + 1)), *places[:1]})
    bounds = [0, *chosen, len(text)]
    return [text[a:b] for a, b in itertools.pairwise(bounds) if a < b]
