"""Hooks of the documentation site: pages from outside of ``docs``, links that follow them, and formulas as MathML."""

import html
import re
from pathlib import Path
from posixpath import relpath

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
OUTSIDE = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "examples/flower_fedbn/README.md": "flower-example.md",
}
"""Files outside of ``docs``, and the pages that they become."""


WIDE = {
    "index.md",
    "gallery.md",
    "benchmark.md",
    "papers.md",
    "which-fedavg.md",
    "troubleshooting.md",
    "performance.md",
}
"""Pages whose tables and pictures take the space of the table of contents."""
GROUP = re.compile(r"\*\*([^*]+)\*\*")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the methods' pages into the sidebar, in the groups of the page that lists them, and the version below."""
    groups: dict[str, list[str]] = {}
    title = ""
    for line in (ROOT / "docs" / "methods" / "README.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|") or len(cells) != 2 or not re.match(r"\[\w+\]\(\w+\.md\)", cells[1]):
            continue
        if match := GROUP.search(cells[0]):
            title = match[1][:1].upper() + match[1][1:]
        groups.setdefault(title, []).extend(f"methods/{name}.md" for name in re.findall(r"\]\((\w+)\.md\)", cells[1]))
    assert config.nav is not None
    for entry in config.nav:
        if "Methods" in entry:
            entry["Methods"] = [
                {"Which to try": "methods/README.md"},
                *({name: pages} for name, pages in groups.items()),
            ]
    source = ROOT / "src" / "fedshift" / "utils" / "version.py"
    version = re.search(r'^__version__ = "(.*)"', source.read_text(encoding="utf-8"), re.MULTILINE)
    assert version is not None
    config.copyright = f"fedshift {version[1]}, Apache-2.0"
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside."""
    for source, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Point links and pictures at where the site has them.

    Links to files outside of ``docs`` lead to their pages, and links from those pages into ``docs``. Pictures in HTML
    are found from the page's own directory.
    """
    path = page.file.src_uri
    if path in WIDE:
        page.meta["hide"] = ["toc"]
    origin = next((source for source, name in OUTSIDE.items() if name == path), f"docs/{path}")

    def follow(match: re.Match[str]) -> str:
        text, target, anchor = match.groups()
        whole = relpath(f"{Path(origin).parent.as_posix()}/{target}", ".")
        new = OUTSIDE.get(whole, whole.removeprefix("docs/") if whole.startswith("docs/") else None)
        if new is None:
            return text
        return f"[{text}]({relpath(new, Path(path).parent.as_posix() or '.')}{anchor or ''})"

    def place(match: re.Match[str]) -> str:
        return f'<img src="{relpath(f"{Path(path).parent.as_posix()}/{match[1]}", page.url)}"'

    markdown = re.sub(r'<img src="(?!https?:)([^"]+)"', place, markdown)
    return re.sub(r"\[([^\]]*)\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)", follow, markdown)


def on_page_content(content: str, **_: object) -> str:
    """Turn formulas into MathML, which browsers show without a script."""
    formula = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
    return formula.sub(
        lambda match: convert(html.unescape(match[2]), display="inline" if match[1] == "span" else "block"), content
    )
