"""The site builds without a warning and without a network, and every page of docs/ is in it."""

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlparse

import pytest
from browser import chromium, errors, look, served

pytest.importorskip("material", reason="the site needs the extra 'docs'")

ROOT = Path(__file__).parents[2]
FETCHED = {"script": "src", "img": "src", "iframe": "src", "source": "srcset", "link": "href"}


class Page(HTMLParser):
    """What a page links to, what it fetches, and what can be linked to in it."""

    def __init__(self, path):
        super().__init__()
        self.links, self.fetched, self.anchors = [], [], {""}
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.anchors |= {attributes.get("id"), attributes.get("name")}
        if tag == "a" and "href" in attributes:
            self.links.append(attributes["href"])
        if tag in FETCHED and FETCHED[tag] in attributes and attributes.get("rel") != "canonical":
            self.fetched.append(attributes[FETCHED[tag]])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site):
    return {path: Page(path) for path in site.rglob("*.html")}


def test_no_two_pages_share_a_title():
    pages = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "research" / "results").glob("*.md")]
    titles = [page.read_text().split("\n", 1)[0] for page in pages]
    assert sorted(titles) == sorted(set(titles))


def test_every_page_of_the_documentation_is_there(site):
    written = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]
    written += [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.ipynb")]
    written += [path.relative_to(ROOT / "research") for path in (ROOT / "research" / "results").glob("*.md")]
    assert len(written) > 10
    menu = (site / "index.html").read_text()
    for page in written:
        shown = page.with_name("index.html" if page.stem == "README" else f"{page.stem}.html")
        assert (site / shown).exists(), page
        assert f'href="{shown.as_posix()}"' in menu, f"{page} is not in the menu"


def test_nothing_is_fetched_from_elsewhere(pages, site):
    for path, page in pages.items():
        for target in page.fetched:
            assert not urlparse(target).netloc, f"{path.name} fetches {target}"
    for style in site.rglob("*.css"):
        assert "@import" not in style.read_text(), style


def test_every_link_and_picture_of_the_site_is_there(pages):
    for path, page in pages.items():
        if path.name == "404.html":
            continue
        for target in page.links + page.fetched:
            address = urlparse(target)
            if address.scheme:
                continue
            file = (path.parent / unquote(address.path)).resolve() if address.path else path
            assert file.exists(), f"{path.name} links to {target}"
            if file in pages:
                assert unquote(address.fragment) in pages[file].anchors, f"{path.name} links to {target}"


def test_the_start_page_is_the_readme(site):
    title, *rest = (ROOT / "README.md").read_text().splitlines()
    text = (site / "index.html").read_text()
    for heading in [title, *(line for line in rest if line.startswith("## "))]:
        assert heading.lstrip("# ") in text
    assert "&lt;!--" not in text, "a bar in an address ends a table's cell"


@pytest.mark.slow
def test_the_reference_shows_every_public_name_with_its_docstring(site):
    import fem
    import fem.functional
    import fem.models
    import fem.theory

    reference = "".join(path.read_text() for path in (site / "api").glob("*.html"))
    headings = set(re.findall(r'<h[2-4] id="([\w.]+)" class="doc', reference))
    for module in (fem, fem.functional, fem.theory, fem.models):
        for name in module.__all__:
            if name not in ("PRIORS", "LORA"):  # dictionaries, which other pages show
                assert any(heading.endswith(f".{name}") for heading in headings), f"{module.__name__}.{name}"
    assert "(Eq. 11)" in reference


LOOKED_AT = ("index.html", "equations.html", "results/index.html", "configuration.html", "api/layer.html", "faq.html")
# A page that is too wide widens the phone's screen, innerWidth too, so its width is compared with what was asked for.
SEEN = """
const text = getComputedStyle(document.querySelector("article")).color;
const page = getComputedStyle(document.body).backgroundColor;
const pictures = [...document.images].filter((image) => image.loading !== "lazy" || image.complete);
return {
  wide: document.documentElement.scrollWidth,
  missing: pictures.filter((image) => !image.naturalWidth).map((image) => image.src),
  unnamed: pictures.filter((image) => !image.hasAttribute("alt")).map((image) => image.src),
  colours: [text, page].map((colour) => colour.match(/[0-9.]+/g).slice(0, 3).reduce((sum, x) => sum + Number(x), 0)),
  torn: [...document.querySelectorAll("article math")].filter((one) => one.getAttribute("display") === "inline"
    && one.parentElement.matches("article, blockquote, div")).length,
  formulas: [...document.querySelectorAll("article p, article td")].filter((part) => part.textContent.includes("$`"))
    .length,
}
"""


@pytest.mark.slow
def test_pages_fit_wide_and_narrow_screens_light_and_dark_without_a_console_error(site):
    """All at 390 px, light and dark in turn; some at 1400 px too."""
    wrong = []
    with served(site) as address, chromium() as driver:
        narrow = [path.relative_to(site).as_posix() for path in sorted(site.rglob("*.html"))]
        for number, (page, width) in enumerate([(page, 390) for page in narrow] + [(page, 1400) for page in LOOKED_AT]):
            dark = number % 2 == 1
            look(driver, f"{address}/{page}", width, dark=dark)
            seen = driver.execute_script(SEEN)
            text, background = seen["colours"]
            found = {
                "wider than the screen": seen["wide"] > width,
                "pictures missing": seen["missing"],
                "pictures without a text": seen["unnamed"],
                "light where it is dark, or dark where it is light": (background < text) != dark,
                "formulas not set": seen["formulas"],
                "formulas torn out of their sentences": seen["torn"],
                "console": errors(driver),
            }
            wrong += [f"{page} at {width} px, {name}: {value}" for name, value in found.items() if value]
    assert wrong == []
