"""Hooks of MkDocs that add to the site: pages from outside ``docs/``, and the API reference.

Pages of ``docs/`` link to the README, to pictures and to source files by their paths in a checkout.
The site has all of these: Markdown becomes a page, a picture is copied, and a source file becomes a
page that shows it. A link to a file that does not exist fails the build.

``mkdocs.yml`` names this file, and MkDocs calls its functions ``on_*``.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(\]\(|src=\"|srcset=\")([^)\s\"#:]+)(#[^)\s\"]*)?(?=[)\"])")
"""Matches a relative link or picture. Groups: what is before its target, the target, the anchor."""
PICTURES = {".png", ".svg"}
ROLE = re.compile(r":(?:meth|class|func|attr|data|mod|exc):(?=<code>)")
"""Matches the role of a reference in a docstring, such as ``:meth:``, which precedes the name."""
TARGET = re.compile(r"(?<=<code>)([^<>&]+?) &lt;[\w.]+&gt;(?=</code>)")
"""Matches a reference in a docstring that has a text of its own; the group is the text."""
API = "api.md"
MEMBERS = {"Config": ["load", "is_set", "to_dict"]}
"""The members that the page shows of a class, if not all. docs/settings.md has the settings."""


def page_of(path: PurePosixPath) -> str:
    """Return the site's path, relative to ``docs/``, of the page for a file of the repository.

    Raises FileNotFoundError if there is no such file.
    """
    file = ROOT / path
    if not file.exists():
        raise FileNotFoundError(path)
    if path.parts[0] == "docs":
        return str(path.relative_to("docs"))
    if path == PurePosixPath("README.md"):
        return "index.md"
    if path.suffix in {".md", *PICTURES}:
        return str(path)
    return f"source/{path}.md"


def rewrite(text: str, place: PurePosixPath) -> tuple[str, set[PurePosixPath]]:
    """Return a page with its links changed to the site's, and the files outside ``docs/`` it links.

    ``place``: the page's path in the repository.
    """
    outside: set[PurePosixPath] = set()

    def target(match: re.Match[str]) -> str:
        before, link, anchor = match.groups()
        path = PurePosixPath(os.path.normpath(place.parent / link))
        if path.parts[0] == "..":
            return match.group()
        if path.parts[0] != "docs":
            outside.add(path)
        found = os.path.relpath(page_of(path), PurePosixPath(page_of(place)).parent)
        if before != "](":  # MkDocs does not change links in HTML, and each page gets a folder
            found = found if page_of(place) == "index.md" else f"../{found}"
        return f"{before}{found}{anchor or ''}"

    parts = re.split(r"(^```.*?^```$|`[^`\n]+`)", text, flags=re.DOTALL | re.MULTILINE)
    parts[::2] = [LINK.sub(target, part) for part in parts[::2]]  # the other parts are code
    return "".join(parts), outside


def source_page(path: PurePosixPath) -> str:
    """Return a page that shows a source file, or the names of a folder's files."""
    file = ROOT / path
    if file.is_dir():
        names = sorted(child.name for child in file.iterdir() if child.is_file())
        return "\n".join([f"# {path}", "", *(f"- `{name}`" for name in names), ""])
    language = {".py": "python", ".toml": "toml", ".sh": "sh", ".yml": "yaml"}.get(path.suffix, "")
    return f"# {path}\n\n`````{language}\n{file.read_text()}\n`````\n"


def api_page() -> str:
    """Return the page of the library's public names, for mkdocstrings."""
    import moetrain

    names = sorted(moetrain.__all__, key=str.lower)
    homes = {name: moetrain._HOMES[name] for name in names}  # pyright: ignore
    lines = ["# Python API", "", "The names of `import moetrain`, with their signatures.", ""]
    for name in names:
        lines += [f"::: {homes[name]}.{name}"]
        if name in MEMBERS:
            lines += ["    options:", f"      members: {MEMBERS[name]}"]
        lines += [""]
    return "\n".join(lines)


# ---- what MkDocs calls --------------------------------------------------------------------------


def on_files(files: Files, config: Any) -> Files:
    """Add the README, the API reference, and the files outside ``docs/`` that pages link to."""
    files.append(File.generated(config, API, content=api_page()))
    waiting = [PurePosixPath("README.md")]
    waiting += [PurePosixPath("docs", file.src_uri) for file in files.documentation_pages()]
    seen = set(waiting)
    while waiting:
        place = waiting.pop()
        if place == PurePosixPath("docs", API):
            continue
        content = ""
        if place.suffix == ".md":
            content, outside = rewrite((ROOT / place).read_text(), place)
            if place == PurePosixPath("README.md"):
                content = f"---\nhide: [navigation]\n---\n{content}"
            waiting += sorted(outside - seen)
            seen |= outside
        if place.parts[0] == "docs":
            continue  # on_page_markdown rewrites it
        if place.suffix in PICTURES:
            added = File.generated(config, str(place), abs_src_path=str(ROOT / place))
        else:
            content = content if place.suffix == ".md" else source_page(place)
            added = File.generated(config, page_of(place), content=content)
        files.append(added)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite the links of a page of ``docs/``."""
    if page.file.generated_by is not None:
        return markdown
    return rewrite(markdown, PurePosixPath("docs", page.file.src_uri))[0]


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Show references in docstrings as names alone."""
    if page.file.src_uri != API:
        return html
    return TARGET.sub(r"\1", ROLE.sub("", html)).replace("<code>~", "<code>")
