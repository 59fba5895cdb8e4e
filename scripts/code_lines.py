"""Counts code: lines that are neither blank nor comment nor docstring.

    python scripts/code_lines.py engine deploy

Python and C++ (*.h, *.cpp, whose comments are `//`) are counted. A folder may also be a file. It
prints one line per folder and a sum. `--files` prints each file too, `--at REV` counts a commit.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import tokenize
from pathlib import Path

NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def code_lines(source: str) -> int:
    """Number of lines that hold code. Lines of a docstring don't count, other strings do."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                lines.difference_update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return len(lines)


def cpp_lines(source: str) -> int:
    """The same for C++ with `//` comments."""
    lines = (line.strip() for line in source.splitlines())
    return sum(1 for line in lines if line and not line.startswith("//"))


COUNTERS = {".py": code_lines, ".h": cpp_lines, ".cpp": cpp_lines}


def sources(folder: str, revision: str | None) -> dict[str, str]:
    """Path and text of every source file below a folder: in the working tree, or at a commit."""
    root = Path(folder)
    if revision is None:
        paths = [root] if root.is_file() else sorted(root.rglob("*"))
        return {str(path): path.read_text() for path in paths if path.suffix in COUNTERS}
    names = subprocess.check_output(
        ["git", "ls-tree", "-r", "--name-only", revision, folder.rstrip("/")], text=True
    ).splitlines()
    return {
        name: subprocess.check_output(["git", "show", f"{revision}:{name}"], text=True)
        for name in names
        if Path(name).suffix in COUNTERS
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+")
    parser.add_argument("--at", metavar="REV", help="count this commit instead of the working tree")
    parser.add_argument("--files", action="store_true", help="print every file")
    arguments = parser.parse_args()
    total = 0
    for folder in arguments.folders:
        counts = {
            name: COUNTERS[Path(name).suffix](text)
            for name, text in sources(folder, arguments.at).items()
        }
        if arguments.files:
            for name, count in counts.items():
                print(f"{count:6} {name}")
        print(f"{sum(counts.values()):6} {folder} ({len(counts)} files)")
        total += sum(counts.values())
    print(f"{total:6} in all")


if __name__ == "__main__":
    main()
