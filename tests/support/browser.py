"""Debian's Chromium without a screen, for pages that people look at."""

import http.server
import os
import shutil
import threading
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec

import pytest


@contextmanager
def chromium():
    programs = {name: shutil.which(name) for name in ("chromium", "chromedriver")}
    missing = [name for name, found in {"selenium": find_spec("selenium"), **programs}.items() if not found]
    if missing:
        remedy = "pip install selenium and, on Debian, apt-get install chromium chromium-driver"
        refuse = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        refuse(f"the page's test needs {' and '.join(missing)}, not found here: {remedy}.")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = programs["chromium"]
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for switch in (
        "headless=new",
        "no-sandbox",
        "disable-gpu",
        "disable-dev-shm-usage",
        "disable-background-networking",
    ):
        options.add_argument(f"--{switch}")
    driver = webdriver.Chrome(options, webdriver.ChromeService(programs["chromedriver"]))
    try:
        yield driver
    finally:
        driver.quit()


def look(driver, address, width=1400, height=900, dark=False):
    """Open a page on a screen of this width; `errors` tells what its console said."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    driver.get_log("browser")
    if driver.current_url.startswith("http"):
        driver.execute_script("localStorage.clear()")  # where a site keeps the colours of the last page
    driver.get(address)


def errors(driver):
    return [line["message"] for line in driver.get_log("browser") if line["level"] == "SEVERE"]


@contextmanager
def served(folder):
    """The address under which a folder can be read."""
    quiet = type("Quiet", (http.server.SimpleHTTPRequestHandler,), {"log_message": lambda *_: None})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
