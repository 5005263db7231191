"""The page of `fem inspect` in a real browser, Debian's Chromium without a screen."""

import re
from dataclasses import replace

import numpy as np
import pytest
from browser import chromium, errors, look
from layers import ABLATIONS, TIME, make_layer
from layers import tokens as make_tokens

from fem.inspect import page as inspection
from fem.inspect.experiment import layer_tables, visible

pytestmark = pytest.mark.slow

NAMES = ["My", " lord", ",\n", "\n", "\tthe", " king", " is", " not", " <b>", " man", " é", " I", " was"]
HEAD = 1
LAYERS = {
    "softmax": [{}, {"n_kv_head": 2}],
    "a prior per channel": [{"prior_type": "mamba"}],
    **{name: [fields] for name, fields in ABLATIONS.items()},
    "another number of channels": [{"fem_dim": 8}, {"fem_dim": 32}],
}


@pytest.fixture(scope="module")
def browser():
    with chromium() as driver:
        yield driver


def made(name="softmax"):
    x = make_tokens(batch=1)
    layers = [make_layer(seed=number, **fields) for number, fields in enumerate(LAYERS[name])]
    return [layer_tables(number + 1, layer.prior.name, layer.inspect(x)) for number, layer in enumerate(layers)]


class Page:
    def __init__(self, browser, path, layers, width=1280, dark=False, first=(0, HEAD)):
        path.write_text(inspection.page("made-up", NAMES, layers, first), encoding="utf-8")
        self.browser, self.layers = browser, layers
        browser.get("about:blank")
        look(browser, path.as_uri(), width, dark=dark)
        self.settle()

    def settle(self):
        self.browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")

    def find(self, selector):
        return self.browser.find_elements("css selector", selector)

    def text(self, selector):
        return self.browser.execute_script("return document.querySelector(arguments[0]).textContent", selector)

    def hover(self, element):
        from selenium.webdriver import ActionChains

        ActionChains(self.browser).move_to_element(element).perform()
        self.settle()

    def click(self, element):
        element.click()
        self.settle()

    def each(self, selector, what):
        """A property, in JavaScript, of every `element` that the selector finds."""
        script = f"return [...document.querySelectorAll(arguments[0])].map((element) => {what})"
        return self.browser.execute_script(script, selector)

    def pictures(self):
        return self.each("canvas", "element.toDataURL()")

    def shades(self):
        return np.array(self.each(".token", "Number(element.style.getPropertyValue('--weight'))"))

    def table(self):
        return self.each("tbody tr", "[...element.children].map((cell) => cell.textContent)")

    def errors(self):
        return errors(self.browser)


@pytest.fixture(scope="module")
def layers():
    return made()


@pytest.fixture
def page(browser, tmp_path, layers):
    page = Page(browser, tmp_path / "page.html", layers)
    yield page
    assert page.errors() == []


@pytest.mark.parametrize("name", LAYERS)
def test_a_page_opens_and_is_explored_without_a_console_error(browser, tmp_path, name):
    page = Page(browser, tmp_path / "page.html", made(name))
    for token in (0, 5, TIME - 1):
        page.hover(page.find(".token")[token])
        assert page.text("#which").endswith(f"at token {token + 1}: {visible(NAMES[token])}")
    for card in page.find(".head"):
        page.click(card)
    assert len(page.table()) == page.layers[-1].read.shape[1]
    assert "NaN" not in page.text("body") + "".join(map(str, page.table()))
    assert page.errors() == []


def test_the_text_is_shown_as_it_is(page):
    shown = page.each(".token", "element.firstChild.data")
    assert shown == [name.replace("\n", "⏎") for name in NAMES]
    assert page.find("#text b") == []


@pytest.mark.parametrize("token", [2, 7, TIME - 1])
def test_hovering_a_token_shows_what_every_channel_reads_there(page, token):
    page.hover(page.find(".token")[(token + 3) % TIME])
    before = page.pictures()
    page.hover(page.find(".token")[token])
    assert all(one != other for one, other in zip(before, page.pictures()))
    found = page.layers[0]
    assert len(page.table()) == found.read.shape[1]
    for channel, (name, _, reads, _, lam, hidden, gate, gap, spread) in enumerate(page.table()):
        q = found.posterior[HEAD, channel, token]
        assert name == str(channel + 1)
        assert reads.startswith(visible(NAMES[q.argmax()]))
        at = lambda part, c=channel: part[HEAD, c, token]  # noqa: E731
        for shown, wanted in (
            (reads.split()[-1], q.max()),
            (lam, at(found.lambda_)),
            (hidden.split()[0], at(found.hidden_beta)),
            (hidden.split()[-1], found.beta[HEAD, channel]),
            (gate, at(found.gate)),
            (gap, at(found.gap)),
            (spread.split()[0], at(found.prior_tokens, 0)),
            (spread.split()[-1], at(found.posterior_tokens)),
        ):
            assert float(shown) == pytest.approx(wanted, abs=0.01 if wanted < 9.9 else 0.06)


def test_the_text_is_shaded_by_the_average_of_the_channels_and_by_one_of_them(page):
    token = 9
    page.click(page.find(".token")[token])
    read = page.layers[0].read[HEAD, :, token]
    np.testing.assert_allclose(page.shades(), read.mean(0) / read.mean(0).max(), atol=0.02)
    page.hover(page.find("tbody tr")[3])
    np.testing.assert_allclose(page.shades(), read[3] / read[3].max(), atol=0.02)


def test_every_channel_is_counted_at_the_token_it_reads_most(page):
    favourites = page.layers[0].read[HEAD, :, -1].argmax(-1)
    marks = page.each(".token i", "element.textContent")
    assert marks == [f"×{n}" if n else "" for n in np.bincount(favourites, minlength=TIME)]


def test_a_click_keeps_a_token_and_leaving_the_text_returns_to_it(page):
    page.click(page.find(".token")[4])
    page.hover(page.find(".token")[8])
    assert "token 9:" in page.text("#which")
    page.hover(page.find("h1")[0])
    assert "token 5:" in page.text("#which")


def test_arrow_keys_move_through_the_text(page):
    page.click(page.find(".token")[4])
    page.hover(page.find("h1")[0])
    for key, token in (("\ue014", 6), ("\ue014", 7), ("\ue012", 6), ("\ue011", 1), ("\ue010", TIME)):
        page.browser.switch_to.active_element.send_keys(key)
        page.settle()
        assert f"token {token}:" in page.text("#which")


def test_a_head_is_chosen_by_its_card_or_by_arrow_keys_from_the_one_tab_stop(page):
    assert page.each(".head", "element.tabIndex").count(0) == 1
    page.click(page.find(".head")[6])
    assert page.text("#which").startswith("Layer 2, head 3")
    assert page.each(".head", "element.ariaPressed").index("true") == 6
    page.click(page.find(".head")[HEAD])
    for key, layer, head in (("\ue014", 1, 3), ("\ue015", 2, 3), ("\ue012", 2, 2), ("\ue013", 1, 2), ("\ue010", 2, 4)):
        page.browser.switch_to.active_element.send_keys(key)
        page.settle()
        assert page.text("#which").startswith(f"Layer {layer}, head {head}")
    assert page.each(".head", "element.tabIndex") == [-1] * 7 + [0]


def test_the_page_opens_with_its_head_in_view_and_says_how_it_is_read(browser, tmp_path):
    layers = [replace(made()[0], layer=number) for number in range(1, 13)]
    page = Page(browser, tmp_path / "page.html", layers, width=1400, first=(10, HEAD))
    card = page.each(
        ".head[aria-pressed=true]", "[element.getBoundingClientRect().top, element.getBoundingClientRect().bottom]"
    )
    assert 0 < card[0][0] < card[0][1] < 900
    assert page.each("details", "element.open") == [False]
    for word in ("λ", "β*", "KL gap"):
        assert word in page.each("dt", "element.textContent")


def test_prior_posterior_and_read_are_different_pictures(page):
    seen = []
    for view in ("prior", "posterior", "read"):
        page.click(page.find(f"input[value={view}]")[0])
        weights = getattr(page.layers[0], view)[HEAD]
        mean = weights[:, TIME - 1].mean(0)
        np.testing.assert_allclose(page.shades(), mean / mean.max(), atol=0.02)
        seen.append(tuple(page.pictures()))
    assert len(set(seen)) == 3


def test_the_chosen_head_stays_beside_heads_far_down(browser, tmp_path):
    layers = [replace(made()[0], layer=number) for number in range(1, 13)]
    page = Page(browser, tmp_path / "page.html", layers)
    last = page.find(".head")[-1]
    browser.execute_script("arguments[0].scrollIntoView({block: 'end'})", last)
    page.click(last)
    assert page.text("#which").startswith("Layer 12, head 4")
    top, bottom = browser.execute_script(
        "const place = document.querySelector('#which').getBoundingClientRect(); return [place.top, place.bottom]"
    )
    assert browser.execute_script("return document.querySelector('#text').getBoundingClientRect().bottom") <= top
    assert bottom < 900
    assert page.errors() == []


@pytest.mark.parametrize("dark", [False, True])
def test_colours_follow_the_system(browser, tmp_path, layers, dark):
    page = Page(browser, tmp_path / "page.html", layers, dark=dark)
    colours = browser.execute_script(
        "const style = getComputedStyle(document.body); return [style.backgroundColor, style.color]"
    )
    background, ink = (sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in colours)
    assert (background < ink) == dark
    assert page.errors() == []


@pytest.mark.parametrize("width", [360, 768])
def test_a_small_screen_needs_no_sideways_scrolling(browser, tmp_path, layers, width):
    Page(browser, tmp_path / "page.html", layers, width=width)
    wide, screen = browser.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
    assert wide <= screen
