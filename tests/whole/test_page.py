"""The page in headless Chromium against ``jserve serve`` with the shipped model.

Every test also judges, at its end, that nothing broke the content policy, nothing was fetched from elsewhere
and the console stayed clean. Needs Chromium with its driver (Debian: chromium chromium-driver) and selenium.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import pytest

from jserve.build import shipped
from tests.whole.test_serve import Server

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
KEY = "sk-page"
WATCH = """window.violations = [];
document.addEventListener("securitypolicyviolation", (e) => violations.push(`${e.violatedDirective} ${e.blockedURI}`));
window.addEventListener("unhandledrejection", (e) => violations.push(`unhandled ${e.reason}`));"""
REFUSED = re.compile(r"the server responded with a status of 40[01] ")
"""What Chromium itself writes to the console when the server refuses a request."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (CHROMIUM and DRIVER), reason="chromium or chromedriver is not installed"
    ),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("serve") / "log"
    running = Server(shipped(), log, max_num_seqs=4, api_key=KEY, log_level="warning")
    yield running
    assert running.stop() == 0


class Page:
    """One tab, and the few things a person does in it."""

    def __init__(self, browser: Any, url: str) -> None:
        self.browser, self.url = browser, url

    def open(self, path: str = "/", *, key: bool = True) -> None:
        self.browser.get(self.url + path)
        if key and not self.js("return sessionStorage.getItem('jserve.key')"):
            self.until(lambda: self.all("dialog.key"), "a question for the key")
            self.one("#key").send_keys(KEY + "\n")
            self.until(lambda: not self.all("dialog.key"), "the dialog to close")
        if key and path == "/":
            self.until(lambda: self.js("return document.querySelector('#model').value"), "a model")

    def size(self, width: int, height: int = 900, scheme: str = "light") -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def js(self, code: str, *args: Any) -> Any:
        return self.browser.execute_script(code, *args)

    def all(self, selector: str) -> list[Any]:
        return self.browser.find_elements("css selector", selector)

    def one(self, selector: str) -> Any:
        return self.browser.find_element("css selector", selector)

    def until(self, condition: Callable[[], Any], what: str, seconds: float = 20.0) -> Any:
        end = time.monotonic() + seconds
        while not (found := condition()):
            assert time.monotonic() < end, f"waited {seconds} s for {what}"
            time.sleep(0.03)
        return found

    def set(self, name: str, value: str | bool) -> None:
        """Fills the control of a field as a person would: opens its section, types."""
        control = self.one(f"[data-field={name}]")
        self.js("arguments[0].closest('details')?.setAttribute('open', '')", control)
        self.js("arguments[0].scrollIntoView({block: 'center'})", control)
        if control.tag_name == "select":
            self.js(
                "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('input', {bubbles: true}))",
                control,
                value,
            )
        elif isinstance(value, bool):
            if control.is_selected() is not value:
                control.click()
        else:
            control.clear()
            control.send_keys(value)

    def send(self, text: str) -> None:
        self.one("#message").send_keys(text + "\n")

    def ask(self, text: str) -> Any:
        """Sends ``text`` and waits for the end of the answer: its element."""
        before = len(self.all(".answer"))
        self.send(text)
        return self.answer(before + 1)

    def answer(self, number: int) -> Any:
        def over() -> Any:
            found = self.all(".answer")
            return len(found) >= number and found[number - 1].get_attribute("aria-busy") == "false"

        self.until(over, "the answer to end")
        return self.all(".answer")[number - 1]

    def text(self, node: Any, selector: str) -> str:
        return self.js(
            "return arguments[0].querySelector(arguments[1])?.textContent ?? ''", node, selector
        )


@pytest.fixture
def page(server: Server) -> Iterator[Page]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    browser = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": WATCH})
        shown = Page(browser, server.url)
        shown.size(1600)
        yield shown
        judge(shown)
    finally:
        browser.quit()


def judge(page: Page) -> None:
    """Nothing broke the policy, came from elsewhere or complained."""
    assert page.js("return violations") == []
    said = [
        entry for entry in page.browser.get_log("browser") if not REFUSED.search(entry["message"])
    ]
    assert said == []
    foreign = [url for url in requested(page) if not url.startswith(page.url)]
    assert foreign == []


def requested(page: Page) -> list[str]:
    events = [
        json.loads(entry["message"])["message"] for entry in page.browser.get_log("performance")
    ]
    sent = [
        e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"
    ]
    return [url for url in sent if not url.startswith(("data:", "chrome"))]


def dashboard(page: Page) -> dict[str, Any]:
    asked = urllib.request.Request(page.url + "/v1/dashboard", headers={"x-api-key": KEY})
    return json.loads(urllib.request.urlopen(asked, timeout=10).read())


def test_the_judge_would_see_it(page: Page) -> None:
    """The policy is in force, and the checks that every test ends with can fail."""
    page.open()
    page.js(
        "const s = document.createElement('img'); s.src = 'https://example.invalid/x.png'; document.body.append(s);"
    )
    page.until(lambda: page.js("return violations.length"), "a violation")
    with pytest.raises(AssertionError):
        judge(page)
    page.js(
        "document.body.setAttribute('style', 'color: red'); const t = document.createElement('script');"
        "try { t.textContent = 'window.ran = 1'; document.head.append(t); } catch (e) { violations.push('' + e); }"
    )
    assert page.js("return window.ran ?? null") is None
    assert page.js("return violations.length") >= 2
    assert any("example.invalid" in url for url in requested(page)), "blocked, and seen"
    page.open()  # clean for the judge at the end
    page.browser.get_log("browser")


def test_the_key_is_asked_for_and_stays_in_the_tab(page: Page) -> None:
    page.open(key=False)
    page.until(lambda: page.all("dialog.key"), "a question for the key")
    page.one("#key").send_keys("wrong\n")
    page.until(lambda: page.all("#key-note.bad"), "the refusal")
    page.one("#key").send_keys(KEY + "\n")
    page.until(lambda: page.js("return document.querySelector('#model').value"), "a model")
    assert page.js("return sessionStorage.getItem('jserve.key')") == KEY
    assert KEY not in page.js(
        "return JSON.stringify(localStorage) + document.cookie + document.body.outerHTML"
    )
    page.open("/dashboard", key=False)
    page.until(
        lambda: page.one("#state").text.startswith("Live"), "the dashboard, with the same key"
    )


def test_a_conversation(page: Page) -> None:
    page.open()
    page.set("system", "You are a helpful assistant who answers in as few words as can be. " * 3)
    answer = page.ask("What is 12 + 30?")
    assert page.text(answer, ".text") == "12 + 30 = 42"
    assert "12 + 30" in page.text(answer, ".thought-text")
    assert page.js("return arguments[0].querySelector('.thought').open", answer) is False
    figures = page.text(answer, ".figures")
    assert re.search(
        r"TTFT \d+ ms .* [\d.]+ tokens/s .* \d+ tokens \(\d+ thought\) .* prompt \d+, 0 cached",
        figures,
    )
    second = page.ask("What is 20 + 11?")
    assert "31" in page.text(second, ".text")
    assert not re.search(r", 0 cached", page.text(second, ".figures")), (
        "the prefix was to be reused"
    )
    assert [node.text for node in page.all(".asked")] == ["What is 12 + 30?", "What is 20 + 11?"]
    page.open()
    assert page.text(page.all(".answer")[0], ".text") == "12 + 30 = 42"
    page.one("#clear").click()
    assert not page.all(".answer")
    page.open()
    assert not page.all(".answer")
    assert page.one(".opening").is_displayed()


def test_stop_ends_the_request_on_the_server_too(page: Page) -> None:
    page.open()
    page.set("schema", '{"type": "string", "minLength": 1500}')  # long, whatever the model wants
    page.set("thinking", "off")
    for way in ("button", "escape"):
        number = len(page.all(".answer")) + 1
        page.send("Tell me a short story about a fox.")
        page.until(
            lambda n=number: len(page.all(".answer")) == n and page.one("#stop").is_displayed(),
            "the stop button",
        )
        page.until(lambda: len(page.text(page.all(".answer")[-1], ".text")) > 40, "some text")
        if way == "button":
            page.js("document.querySelector('#stop').click()")
        else:
            page.one("#message").send_keys("\ue00c")
        answer = page.answer(number)
        assert "ended by you" in page.text(answer, ".figures")
        assert page.one("#send").is_displayed()
        page.until(lambda: dashboard(page)["requests"]["running"] == 0, "the server to stop", 5)
        assert len(page.text(answer, ".text")) < 1500


def test_the_schema_box(page: Page) -> None:
    page.open()
    page.set("schema", '{"type": ')
    page.send("Hello")
    page.until(lambda: page.all("#schema[aria-invalid=true]"), "the fault")
    assert page.js("return document.activeElement.id") == "schema"
    assert "not valid JSON" in page.one("#schema-fault").text
    assert not page.all(".answer")
    assert page.one("#message").get_attribute("value") == "Hello", (
        "what was not sent is still there"
    )
    page.one("#message").clear()
    page.set("schema", '{"type": "object", "not": {"type": "string"}}')
    refused = page.ask("Hello")
    assert "not" in page.text(refused, ".error")
    assert page.all("#schema[aria-invalid=true]"), "the field that the server named"
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "maximum": 99},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    page.set("schema", json.dumps(schema))
    page.set("max_tokens", "200")
    page.set("thinking", "off")
    jsonschema.validate(json.loads(page.text(page.ask("Who are you?"), ".text")), schema)


def test_the_tools_box(page: Page) -> None:
    page.open()
    page.set("tools", "{}")
    page.send("x")
    page.until(lambda: page.all("#tools[aria-invalid=true]"), "the fault")
    page.one("#message").clear()
    page.js("document.querySelector('[data-example=tools]').click()")
    page.set("tool_choice", "required")
    answer = page.ask("What is the weather in Paris?")
    assert page.text(answer, ".call-name code") == "get_weather"
    assert isinstance(json.loads(page.text(answer, ".call pre"))["city"], str)
    assert "tool call" in page.text(answer, ".figures")
    page.set("tool_choice", "none")
    page.one(".results textarea").send_keys("sunny, 21 degrees")
    page.one(".results button").click()
    told = page.answer(2)
    assert page.text(told, ".text")
    assert not page.all(".error p")
    assert page.text(page.one(".asked.result"), "span") == "tool result"
    assert not page.all(".results"), "answered calls ask no more"


def test_tokens_have_colours_and_alternatives(page: Page) -> None:
    page.open()
    page.set("logprobs", True)
    page.set("top_logprobs", "4")
    page.set("temperature", "1.2")
    page.set("seed", "3")
    answer = page.ask("Tell me a short story about a fox.")
    n = int(re.search(r"(\d+) tokens ", page.text(answer, ".figures"))[1])  # type: ignore[index]
    tokens = page.all(".token")
    assert len(tokens) == n
    classes = {token.get_attribute("class").split()[1] for token in tokens}
    assert len(classes) >= 4, "a story is sure of some words and not of others"
    colours = page.js(
        "return [...new Set([...document.querySelectorAll('.token')].map((t) => getComputedStyle(t).backgroundColor))]"
    )
    assert len(colours) == len(classes)
    assert page.js("return document.querySelectorAll('.token[tabindex=\"0\"]').length") == 1, (
        "one tab stop"
    )
    page.js("arguments[0].focus()", tokens[0])
    tip = page.one("#alternatives")
    assert tip.is_displayed()
    assert len(page.all(".alternative")) in (4, 5)
    assert len(page.all(".alternative.chosen")) == 1
    from selenium.webdriver.common.keys import Keys

    tokens[0].send_keys(Keys.ARROW_RIGHT)
    assert page.js("return document.activeElement.dataset.i") == "1"
    page.js("return document.activeElement").send_keys(Keys.ESCAPE)
    assert not tip.is_displayed()
    inside = page.js(
        "arguments[0].scrollIntoView({block: 'end'}); arguments[0].blur(); arguments[0].focus();"
        "const b = document.querySelector('#alternatives').getBoundingClientRect();"
        "return b.left >= 0 && b.top >= 0 && b.right <= innerWidth && b.bottom <= innerHeight",
        tokens[-1],
    )
    assert inside
    (toggle,) = [b for b in page.all(".answer button") if b.text == "Tokens"]
    toggle.click()
    assert not page.all(".token")
    assert page.text(answer, ".text")


def test_the_request_as_code(page: Page) -> None:
    page.open()
    page.set("system", 'It\'s "you".')
    page.set("temperature", "0")
    answer = page.ask("What is 2 + 2?")
    page.js("arguments[0].querySelector('.request').open = true", answer)
    code = page.until(lambda: page.text(answer, ".request code"), "the code")
    assert KEY not in code
    done = subprocess.run(
        ["bash", "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env={"JSERVE_API_KEY": KEY, "PATH": "/usr/bin:/bin"},
    )
    if "not found" not in done.stderr:  # no curl on this machine
        assert done.stdout.endswith("data: [DONE]\n\n"), done.stdout[-300:] + done.stderr
    python, copy = (
        next(b for b in page.all(".request button") if b.text == name)
        for name in ("Python", "Copy request")
    )
    python.click()
    assert "OpenAI(base_url=" in page.text(answer, ".request code")
    copy.click()
    page.until(lambda: copy.text == "Copied", "the copy")


def test_errors_of_the_server_name_the_field(page: Page) -> None:
    page.open()
    page.set("max_tokens", "999999")
    refused = page.ask("Hello")
    assert "max_tokens" in page.text(refused, ".error")
    assert page.all("#max_tokens[aria-invalid=true]")
    page.set("max_tokens", "30")
    assert not page.all("#max_tokens[aria-invalid=true]")
    next(b for b in page.all(".answer button") if b.text == "Try again").click()
    page.until(lambda: page.text(page.all(".answer")[-1], ".text"), "an answer")
    page.answer(1)
    assert len(page.all(".answer")) == 1
    assert not page.all(".error p")


def test_text_stays_text(page: Page) -> None:
    page.open()
    nasty = "<img src=x onerror=alert(1)><script>alert(1)</script>"
    page.ask(nasty)
    assert page.one(".asked").text == nasty
    source = f"# {nasty}\n\n- {nasty}\n\n```\n{nasty}\n```\n**{nasty}** `{nasty}` [x](javascript:alert(1))"
    found = page.browser.execute_async_script(
        "const done = arguments[1]; import('/web/markdown.js').then(({ markdown }) => {"
        "const box = document.createElement('div'); box.append(markdown(arguments[0]));"
        "done([box.querySelectorAll('img, script, a, [onerror]').length, box.textContent]); });",
        source,
    )
    assert found[0] == 0
    assert found[1].count(nasty) == 5


def test_the_dashboard_moves(page: Page) -> None:
    page.open()
    page.open("/dashboard")
    page.until(lambda: page.one("#state").text.startswith("Live"), "a first answer")
    page.until(lambda: page.all("#lanes tr"), "the lanes")
    before, finished = page.one("#step").text, bulk_finished(page)
    tell_stories(page, 3)
    page.until(lambda: page.one("#step").text not in ("", before), "new steps")
    page.until(lambda: bulk_finished(page) == finished + 3, "the lane")
    page.until(lambda: re.search(r"[1-9]", path_of(page, "path.prefill")), "a prefill bar")
    page.until(lambda: len(path_of(page, ".line.s0")) > 20, "a curve")
    label = page.one("#steps [role=img]").get_attribute("aria-label")
    assert re.search(r"The last one: step \d+: [\d.]+ ms, 1 row, 1 drawn", label)
    tiles = dict(tile.text.split("\n")[:2] for tile in page.all(".tiles > div"))
    for name in ("TTFT p50", "ITL p50"):
        assert re.fullmatch(r"[\d.]+ ?ms", tiles[name]), tiles
    polls = [url for url in requested(page) if "/v1/dashboard" in url]
    numbers = [int(url.rsplit("=", 1)[1]) for url in polls]
    assert numbers == sorted(numbers)
    assert numbers[-1] > 0, "only new steps are asked for"


def tell_stories(page: Page, n: int) -> None:
    text = "Tell me a short story about a fox."
    body = {"messages": [{"role": "user", "content": text}], "lane": "bulk", "max_tokens": 100}
    headers = {"x-api-key": KEY, "content-type": "application/json"}
    for _ in range(n):
        asked = urllib.request.Request(
            f"{page.url}/v1/chat/completions", json.dumps(body).encode(), headers
        )
        urllib.request.urlopen(asked, timeout=60).read()


def bulk_finished(page: Page) -> int:
    # In one go: the rows are drawn anew every second.
    rows = page.js("return [...document.querySelectorAll('#lanes tr')].map((row) => row.innerText)")
    return int(next(row for row in rows if row.startswith("bulk")).split()[3])


def path_of(page: Page, selector: str) -> str:
    return page.js("return document.querySelector(arguments[0]).getAttribute('d') ?? ''", selector)


@pytest.mark.parametrize("path", ["/", "/dashboard"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 380, 1024, 1600])
def test_it_fits_and_can_be_read(page: Page, width: int, scheme: str, path: str) -> None:
    page.size(width, 800, scheme)
    page.open()
    if path == "/":
        page.ask("What is 12 + 30?")
    page.open(path)
    page.js("document.querySelectorAll('.answer details').forEach((d) => (d.open = true))")
    time.sleep(0.3)
    wide = page.js(
        "return [...document.querySelectorAll('html, #log, .request, .plot')]"
        ".filter((n) => n.scrollWidth > n.clientWidth).map((n) => n.tagName + n.className)"
    )
    assert wide == [], "no sideways scrolling"
    faint = page.js(CONTRAST)
    assert faint == [], "text under 4.5 : 1"
    nameless = page.js(NAMELESS)
    assert nameless == []


NAMELESS = """
return [...document.querySelectorAll("button, input, select, textarea, a")]
  .filter((n) => n.checkVisibility())
  .filter((n) => !(n.getAttribute("aria-label") || n.textContent.trim() || n.labels?.length))
  .map((n) => n.outerHTML);
"""
CONTRAST = """
const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
const rgb = (colour) => {
  canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
  return [...canvas.getImageData(0, 0, 1, 1).data];
};
const linear = (v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
const light = (c) => c.slice(0, 3).map((v) => linear(v / 255))
  .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
const behind = (node) => {
  for (; node; node = node.parentElement) {
    const c = rgb(getComputedStyle(node).backgroundColor);
    if (c[3] === 255) return c;
  }
  return [255, 255, 255, 255];
};
const found = new Set();
for (const node of document.querySelectorAll("body *")) {
  const own = [...node.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
  if (!own || !node.checkVisibility({ opacityProperty: true }) || node.disabled || node.closest("svg")) continue;
  const [a, b] = [light(rgb(getComputedStyle(node).color)), light(behind(node))];
  const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  if (ratio < 4.5) found.add(`${node.tagName}.${node.className} ${ratio.toFixed(2)}`);
}
return [...found];
"""


def test_settings_open_and_close_by_keyboard_on_a_small_screen(page: Page) -> None:
    from selenium.webdriver.common.keys import Keys

    page.size(380, 760)
    page.open()
    toggle = page.one("#settings-toggle")
    assert not page.one("#settings").is_displayed()
    toggle.send_keys(Keys.ENTER)
    assert page.one("#settings").is_displayed()
    assert toggle.get_attribute("aria-expanded") == "true"
    assert page.js("return document.querySelector('#settings').contains(document.activeElement)")
    page.js("return document.activeElement").send_keys(Keys.ESCAPE)
    assert not page.one("#settings").is_displayed()
    assert page.js("return document.activeElement.id") == "settings-toggle"


def test_settings_and_theme_are_remembered(page: Page) -> None:
    page.open()
    page.set("temperature", "0.3")
    page.set("logprobs", True)
    slider = page.js("return document.querySelector('[data-for=temperature]').value")
    assert float(slider) == 0.3
    dark = "return getComputedStyle(document.documentElement).colorScheme"
    page.one("[data-theme-toggle]").click()
    assert page.js(dark) == "dark"
    page.open()
    assert page.js(dark) == "dark"
    assert page.one("#temperature").get_attribute("value") == "0.3"
    assert page.one("#logprobs").is_selected()
    page.one("#reset").click()
    page.open()
    assert page.one("#temperature").get_attribute("value") == ""
    assert not page.one("#logprobs").is_selected()
