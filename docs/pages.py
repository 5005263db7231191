"""Pages of the site that are no Markdown files below docs/: the README, CONTRIBUTING, the results and the notebooks.

Mathematics is written as GitHub reads it, and becomes MathML here, which browsers set themselves.
"""

import json
import re
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from fem import __version__

DOCS = Path(__file__).parent
RESEARCH = DOCS.parent / "research"
FROM_THE_ROOT = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
MOVED = {
    "../README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "CITATION.cff": "faq.md#how-to-cite",
}
PICTURE = re.compile(r"<picture>.*?</picture>", re.DOTALL)
LINE = 22  # characters of a cell that stay on one line
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def on_config(config: MkDocsConfig) -> None:
    """Every page says at its end which version it is of, and where the paper is."""
    project = (DOCS.parent / "pyproject.toml").read_text(encoding="utf-8")
    paper = re.search(r'^Paper = "(.+)"$', project, re.MULTILINE)[1]
    config.copyright = f'Version {__version__} of free-energy-mixer. <a href="{paper}">The paper</a>'


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for page, file in FROM_THE_ROOT.items():
        files.append(File.generated(config, page, content=(DOCS.parent / file).read_text()))
    for path in sorted(path for path in RESEARCH.glob("results/**/*") if path.suffix in (".md", ".png")):
        name = path.relative_to(RESEARCH).as_posix()
        files.append(File(name, str(RESEARCH), config.site_dir, config.use_directory_urls))
    for notebook in sorted(DOCS.glob("notebooks/*.ipynb")):
        page = notebook.relative_to(DOCS).with_suffix(".md").as_posix()
        files.append(File.generated(config, page, content=notebook_page(notebook)))
    pages, placed = [file.src_uri for file in files if file.is_documentation_page()], set()
    config.nav = [expanded(entry, pages, placed) for entry in config.nav]
    return files


def expanded(entry, pages: list[str], placed: set[str]):
    """An entry of the menu, its patterns replaced by the pages that stand nowhere before."""
    if isinstance(entry, dict):
        return {title: expanded(target, pages, placed) for title, target in entry.items()}
    if isinstance(entry, list):
        found = (expanded(part, pages, placed) for part in entry)
        return [page for part in found for page in (part if isinstance(part, list) else [part])]
    if "*" not in entry:
        placed.add(entry)
        return entry
    matching = sorted(page for page in pages if page not in placed and Path(page).match(entry))
    placed.update(matching)
    return matching


def on_page_markdown(markdown: str, **_) -> str:
    """Links lead where they lead in the repository, and formulas are set."""
    linked = re.sub(r"\]\(([^)#]+)", lambda link: f"]({site_address(link[1])}", markdown)
    linked = PICTURE.sub(by_palette, re.sub(r'((?:src|srcset)=")(?:docs|research)/', r"\1", linked))
    return typeset(linked)


def typeset(markdown: str) -> str:
    """Formulas between ```math and ```, and between $` and `$, as MathML."""
    block = re.compile(r"^```math\n(.*?)\n```$", re.MULTILINE | re.DOTALL)
    markdown = block.sub(lambda found: convert(found[1], display="block"), markdown)
    # within a span, or one that begins a line would be a block
    return re.sub(r"\$`([^`]+)`\$", lambda found: f"<span>{convert(found[1])}</span>", markdown)


def by_palette(picture: re.Match) -> str:
    """A picture for each of the site's palettes, chosen against the system's perhaps. A style turns plots."""
    sources = re.findall(r'<source media="(.+?)" srcset="(.+?)">', picture[0])
    image = re.search(r"<img .+?>", picture[0])[0]
    if ".png" in image:
        return image
    wide = {"dark": next(at for media, at in sources if media == "(prefers-color-scheme: dark)")}
    wide["light"] = re.search(r'src="(.+?)"', image)[1]
    shown = [(scheme, at, at.replace(".svg", "_narrow.svg")) for scheme, at in wide.items()]
    return "\n".join(
        f'<picture><source media="(max-width: 600px)" srcset="{narrow}">'
        f"{image.replace(wide['light'], f'{at}#only-{scheme}')}</picture>"
        for scheme, at, narrow in shown
    )


def on_post_page(output: str, **_) -> str:
    """What a screen reader, the keyboard and a phone need: a name for the search, a way into what scrolls sideways, and
    room for the cells of a table that hold sentences, so that the others stay on their line.
    """
    named = output.replace(
        'data-md-component="search" role="dialog"', 'data-md-component="search" role="dialog" aria-label="Search"'
    )
    roomy = re.sub(r"<td(?: style=\"[^\"]*\")?>(.*?)</td>", with_room, named)
    return re.sub(r"<table>(?=\n<thead>\n<tr>(?:\n<th.*?</th>){6})", '<table tabindex="0">', roomy)


def with_room(cell: re.Match) -> str:
    length = len(re.sub(r"<[^>]+>", "", cell[1]))
    room = "words sentence" if length > 4 * LINE else "words"
    return cell[0].replace("<td", f'<td class="{room}"', 1) if length > LINE else cell[0]


def on_post_template(output_content: str, **_) -> str:
    """The page of what is not found is no page of docs/."""
    return on_post_page(output_content)


def site_address(target: str) -> str:
    target = target.replace("../../docs/", "../").replace("../research/results/", "results/")
    return re.sub(r"\.ipynb$", ".md", MOVED.get(target, re.sub("^(docs|research)/", "", target)))


def notebook_page(notebook: Path) -> str:
    """Text and code of a notebook, and what the code printed and drew."""
    cells = json.loads(notebook.read_text())["cells"]
    title, *parts = (part for cell in cells for part in (source(cell), *map(shown, cell.get("outputs", []))))
    download = f'<a href="{notebook.name}" download>This page is a notebook: download it.</a>'
    return "\n\n".join([title, download, *parts])


def source(cell: dict) -> str:
    text = "".join(cell["source"])
    return text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```"


def shown(output: dict) -> str:
    data = output.get("data", {})
    if "image/png" in data:
        return f"![what the code above draws](data:image/png;base64,{''.join(data['image/png'].split())})"
    text = "".join(output.get("text", data.get("text/plain", "")))
    return f"```{{.text .output}}\n{COLOURS.sub('', text).rstrip()}\n```"
