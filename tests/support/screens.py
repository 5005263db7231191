"""`make screens`: pictures of the README, the site's pages and fem inspect's, light and dark, wide and narrow.

    python tests/support/screens.py SITE OUT [INSPECT_PAGE] [--axe axe.min.js] [--github github-markdown.css]

Pictures are of whole pages. A page that is wider than its screen, or whose console complains, ends with status 1.
The README looks as on GitHub with GitHub's styles, which `npm pack github-markdown-css` brings.
With axe-core's axe.min.js, which `npm pack axe-core` brings, every page is checked for faults of accessibility, in the
light and in the dark.
"""

import argparse
import base64
import sys
from pathlib import Path

from browser import chromium, errors, look, served
from markdown_it import MarkdownIt

SHOWN = (
    *("index", "faq", "architecture", "limits", "configuration", "equations", "inspect", "results/index"),
    *("results/mad_laptop", "results/ablate_softmax", "results/regimes", "results/clients", "results/serving_vllm"),
)
LONGEST = 16_000  # pixels: Chromium draws no larger picture
AXE = "const done = arguments[0]; axe.run(document).then((found) => done(found.violations))"


def readme(styles: Path | None, out: Path) -> str:
    """The address of the README as a page of its own, its mathematics set and its pictures found."""
    root = Path(__file__).parents[2]
    sys.path.insert(0, str(root / "docs"))
    from pages import typeset

    text = typeset((root / "README.md").read_text(encoding="utf-8"))
    style = "" if styles is None else styles.read_text(encoding="utf-8")
    page = README.format(style=style, root=root.as_uri(), body=MarkdownIt().enable("table").render(text))
    (out / "README.html").write_text(page, encoding="utf-8")
    return (out / "README.html").resolve().as_uri()


README = """<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark"><title>README</title><base href="{root}/">
<style>{style} .markdown-body {{ max-width: 1012px; margin: auto; padding: 1rem }} img {{ max-width: 100% }}</style>
<article class="markdown-body">{body}</article></html>"""


def pictures(driver, addresses: dict[str, str], folder: Path) -> list[str]:
    """Draw every page on both screens in both palettes; what is too wide, and what the console says."""
    found = []
    for name, address in addresses.items():
        for width in (1400, 390):
            for dark in (False, True):
                look(driver, address, width, dark=dark)
                driver.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
                wide, high = driver.execute_script(
                    "const page = document.documentElement; return [page.scrollWidth, page.scrollHeight]"
                )
                how = f"{name} ({width}, {'dark' if dark else 'light'})"
                found += [f"{how}: {wide} pixels wide"] if wide > width else []
                found += [f"{how}: the console says {message}" for message in errors(driver)]
                part = {"x": 0, "y": 0, "width": width, "height": min(high, LONGEST), "scale": 1}
                whole = {"captureBeyondViewport": True, "clip": part}
                png = driver.execute_cdp_cmd("Page.captureScreenshot", whole)["data"]
                shot = folder / f"{name.replace('/', '_')}_{width}_{'dark' if dark else 'light'}.png"
                shot.write_bytes(base64.b64decode(png))
    return found


def faults(driver, addresses: dict[str, str], axe: str) -> list[str]:
    """ "page: rule (impact, how often): the first element", of every page in the light and in the dark."""
    found = []
    driver.set_script_timeout(300)  # a long page with formulas takes a minute on a busy machine
    for name, address in addresses.items():
        for dark in (False, True):
            look(driver, address, dark=dark)
            driver.execute_script(axe)
            for fault in driver.execute_async_script(AXE):
                where = fault["nodes"][0]["html"][:100]
                how = "dark" if dark else "light"
                found.append(f"{name} ({how}): {fault['id']} ({fault['impact']}, {len(fault['nodes'])}x): {where}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("site", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("inspect", type=Path, nargs="?")
    parser.add_argument("--axe", type=Path)
    parser.add_argument("--github", type=Path)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    with served(given.site) as address, chromium() as driver:
        pages = {
            page.relative_to(given.site).with_suffix("").as_posix(): f"{address}/{page.relative_to(given.site)}"
            for page in sorted(given.site.rglob("*.html"))
        }
        own = {} if given.inspect is None else {"inspect_page": given.inspect.resolve().as_uri()}
        shown = {"README": readme(given.github, given.out)} | {name: pages[name] for name in SHOWN} | own
        found = pictures(driver, shown, given.out)
        print(f"{4 * len(shown)} pictures in {given.out}, {len(found)} faults", flush=True)
        if given.axe is not None:
            violations = faults(driver, pages | own, given.axe.read_text(encoding="utf-8"))
            print(f"axe-core, {len(pages | own)} pages in two palettes: {len(violations)} violations")
            found += violations
    print("\n".join(found))
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
