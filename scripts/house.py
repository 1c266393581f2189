"""Print the figures of the package's structure: its size, its names, its longest import chain.

    python scripts/house.py [moetrain]

Lines and modules count every Python file, also without kernels and families of models, which grow
with what is supported. Entries are the files and folders at the package's top.
Public names are top-level functions, classes and constants without a leading underscore; imported
names do not count. The chain is the longest path of imports between modules of the package, imports
inside functions left out. ``tests/test_structure.py`` holds the figures to their limits.
"""

import ast
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple


class Figures(NamedTuple):
    """What :func:`measure` finds."""

    lines: int
    modules: int
    lines_beside: int
    """Lines outside ``kernels/`` and ``models/families/``."""
    modules_beside: int
    entries: list[str]
    public_names: int
    longest_file: tuple[int, str]
    median_line: float
    """Characters of a line that is not empty."""
    chain: tuple[str, ...]
    """Modules, each of which imports the next."""
    shared_class_names: dict[str, list[str]]
    """Class names that several modules define, with the modules."""

    @property
    def names_per_thousand_lines(self) -> float:
        """Public names per 1,000 lines."""
        return 1000 * self.public_names / self.lines


def _imports(node: ast.AST, modules: set[str]) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom) and child.module:
            for alias in child.names:
                inner = f"{child.module}.{alias.name}"
                yield inner if inner in modules else child.module
        elif not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _imports(child, modules)


def _names(statement: ast.stmt) -> list[str]:
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [statement.name]
    targets = statement.targets if isinstance(statement, ast.Assign) else ()
    targets = [statement.target] if isinstance(statement, ast.AnnAssign) else targets
    found = [node for target in targets for node in ast.walk(target)]  # of tuples too
    return [node.id for node in found if isinstance(node, ast.Name)]


def measure(package: Path) -> Figures:
    """Read every module of ``package`` and count."""
    files = {
        ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(
            ".__init__"
        ): path
        for path in sorted(package.rglob("*.py"))
    }
    texts = {name: path.read_text() for name, path in files.items()}
    trees = {name: ast.parse(text) for name, text in texts.items()}
    lines = [line for text in texts.values() for line in text.splitlines()]
    public = sum(
        not name.startswith("_")
        for tree in trees.values()
        for statement in tree.body
        for name in _names(statement)
    )
    homes = defaultdict(list)
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(name)
    graph = {
        name: {other for other in _imports(tree, set(files)) if other in files and other != name}
        for name, tree in trees.items()
    }

    beside = [
        texts[name]
        for name, path in files.items()
        if not {"kernels", "families"} & set(path.relative_to(package).parts[:-1])
    ]

    @cache
    def chain(name: str) -> tuple[str, ...]:
        return name, *max((chain(other) for other in graph[name]), key=len, default=())

    return Figures(
        lines=len(lines),
        modules=len(files),
        lines_beside=sum(len(text.splitlines()) for text in beside),
        modules_beside=len(beside),
        entries=sorted(p.name for p in package.iterdir() if p.name not in IGNORED),
        public_names=public,
        longest_file=max((len(text.splitlines()), name) for name, text in texts.items()),
        median_line=statistics.median(len(line) for line in lines if line.strip()),
        chain=max((chain(name) for name in files), key=len),
        shared_class_names={name: where for name, where in homes.items() if len(where) > 1},
    )


IGNORED = ("__pycache__", "py.typed")


def main() -> None:
    """Print the figures of the package that the command line names."""
    figures = measure(Path(sys.argv[1] if len(sys.argv) > 1 else "moetrain").resolve())
    print(f"lines                      {figures.lines:,}")
    print(f"  beside kernels, families {figures.lines_beside:,}")
    print(f"modules                    {figures.modules}")
    print(f"  beside kernels, families {figures.modules_beside}")
    print(f"entries at the top         {len(figures.entries)}: {', '.join(figures.entries)}")
    print(f"public names               {figures.public_names}")
    print(f"  per 1,000 lines          {figures.names_per_thousand_lines:.1f}")
    print(f"longest file               {figures.longest_file[0]} lines, {figures.longest_file[1]}")
    print(f"median line                {figures.median_line:.0f} characters")
    print(f"longest import chain       {len(figures.chain)}: {' > '.join(figures.chain)}")
    print(f"class names used twice     {figures.shared_class_names or 'none'}")


if __name__ == "__main__":
    main()
