import contextlib
import copy
import html.parser
import io
import json
import pathlib
import struct
import zlib

import pytest

from bridge import __main__
from bridge._cli.report import _html

from . import browser, mixed_models
from .command_line import run

ROOT = pathlib.Path(mixed_models.__file__).parents[2]
HOSTILE = "<script>alert('\"&')</script><img src=x onerror=alert(1)>"
# What a user would do, and what they would see: read by the tests from the page's own document.
PROBE = """
<script>
const seen = {};
const shown = e => e.checkVisibility();
const rows = [...document.querySelectorAll('.tree .row:not(.head)')];
const visible = () => rows.filter(shown).map(
  row => row.querySelector('.name').title);
seen.rows = rows.length;
seen.first = visible();
document.querySelector('#open').click();
seen.opened = visible();
document.querySelector('#close').click();
seen.closed = visible();
const type = text => {
  const search = document.querySelector('#search');
  search.value = text;
  search.dispatchEvent(new Event('input'));
};
type('nnx inner/LINEAR');
seen.found = visible();
seen.count = document.querySelector('#count').textContent;
type('');
document.querySelector('#open').click();
seen.again = visible();
const page = document.documentElement;
seen.overflow = page.scrollWidth - page.clientWidth;
seen.images = document.images.length;
seen.figures = [...document.querySelectorAll('.figure')].map(e => e.textContent);
const light = text => {
  const parts = text.match(/[\\d.]+/g).slice(0, 3).map(v => v / 255).map(
    v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
};
const ground = e => {
  const color = getComputedStyle(e).backgroundColor;
  return color === 'rgba(0, 0, 0, 0)' ? ground(e.parentElement) : color;
};
seen.contrast = Math.min(...[...document.querySelectorAll('body *')].filter(
  e => shown(e) && [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim())).map(e => {
    const [a, b] = [light(getComputedStyle(e).color), light(ground(e))];
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  }));
seen.ground = light(ground(document.body));
const out = document.createElement('pre');
out.id = 'probe';
out.textContent = JSON.stringify(seen);
document.body.append(out);
</script>
"""


class Page(html.parser.HTMLParser):
    """The tags of a page, and the texts in them."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.texts = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        if self.tags and self.tags[-1][0] not in ("script", "style"):
            self.texts.append(data)


@pytest.fixture(scope="module")
def document():
    """The report on the mixed model, as `--json` gives it."""
    out = io.StringIO()
    with contextlib.chdir(ROOT), contextlib.redirect_stdout(out):
        __main__.main(["report", "tests._cli.mixed_models:make_mixed", "--json"])
    return json.loads(out.getvalue())


@pytest.fixture(scope="module")
def hostile(document):
    """The same with names that would be markup if they were not escaped."""
    changed = copy.deepcopy(document)
    changed["target"] = HOSTILE
    changed["notes"] = [HOSTILE]
    module = changed["modules"][-1]
    module["path"] = module["name"] = module["class"] = HOSTILE
    module["source"] = {"import_path": HOSTILE, "file": HOSTILE, "line": 1}
    module["counterpart"] = {"exists": True, "name": HOSTILE}
    module["kind"] = "linen"
    return changed


def test_the_page_is_one_file_that_loads_nothing(document):
    tags = Page(_html.page(document)).tags
    assert [tag for tag, _ in tags].count("script") == 1
    assert not {tag for tag, _ in tags} & {"img", "iframe", "object", "base", "form"}
    links = [a[k] for _, a in tags for k in ("src", "href", "action", "srcset") if k in a]
    assert links == ["data:,"]
    policy = [a["content"] for tag, a in tags if tag == "meta" and "http-equiv" in a]
    assert policy[0].startswith("default-src 'none'")
    assert "url(" not in _html.page(document)
    assert "@import" not in _html.page(document)


def test_names_are_escaped_everywhere(document, hostile):
    plain, escaped = Page(_html.page(document)), Page(_html.page(hostile))
    extra = len(hostile["notes"]) - len(document["notes"])
    # One more note, and one more row of Linen classes with its five cells.
    assert len(escaped.tags) == len(plain.tags) + extra + 7
    assert all("onerror" not in attributes for _, attributes in escaped.tags)
    assert escaped.texts.count(HOSTILE) >= 5


def test_the_page_holds_what_the_report_says(document):
    page = Page(_html.page(document))
    titles = [a["title"] for _, a in page.tags if (a.get("class") or "") == "name" and "title" in a]
    assert titles == [module["path"] or "model" for module in document["modules"]]
    text = " ".join(page.texts)
    assert "38.9%" in text
    assert "56 of 144 (216 B of 568 B)" in text
    assert "46.2%" in text


def test_classes_that_are_left_are_summed_up_largest_first(document):
    text = " ".join(Page(_html.page(document)).texts)
    remaining = text[text.index("Linen classes that are left") :].split()
    dense = remaining.index("Dense")
    assert remaining[dense + 1 : dense + 3] == ["4", "80"]
    assert dense < remaining.index("BatchNorm") < remaining.index("LinenBlock")


def test_a_page_takes_the_place_of_an_earlier_one_and_of_nothing_else(
    capsys, monkeypatch, tmp_path
):
    monkeypatch.chdir(ROOT)
    target, page = "bridge._demo._models:NnxDigitsCNN", tmp_path / "page.html"
    arguments = ("report", target, "--html", page)
    page.write_text("<!doctype html><title>mine</title>")
    outcome = run(capsys, *arguments)
    assert outcome.code == 2
    assert f"a file at {page} that this command did not write" in outcome.err
    assert page.read_text() == "<!doctype html><title>mine</title>"
    page.unlink()
    assert run(capsys, *arguments).code == 0
    written = page.read_text()
    page.write_text(written.replace("</body>", "old</body>"))
    assert run(capsys, *arguments).code == 0
    assert page.read_text() == written


def test_a_migrated_model_has_no_classes_left(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    target = "tests._cli.mixed_models:make_nnx_pair"
    outcome = run(capsys, "report", target, "--html", tmp_path / "page.html")
    assert outcome.code == 0
    assert "Linen classes that are left" not in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("scheme", "is_dark"), [(browser.LIGHT, False), (browser.DARK, True)], ids=["light", "dark"]
)
def test_the_page_works_in_a_browser_without_an_error(document, tmp_path, scheme, is_dark):
    page = tmp_path / "page.html"
    page.write_text(_html.page(document).replace("</body>", f"{PROBE}</body>"))
    dom, console = browser.start(page, tmp_path / "profile", "--dump-dom", *scheme)
    assert console == []
    start = dom.index('<pre id="probe">') + len('<pre id="probe">')
    seen = json.loads(dom[start : dom.index("</pre>", start)])
    paths = [module["path"] or "model" for module in document["modules"]]
    assert seen["rows"] == len(paths)
    # Two levels are open at first, the third is folded.
    assert seen["first"] == [p for p in paths if "inner/" not in p]
    assert seen["opened"] == seen["again"] == paths
    assert seen["closed"] == ["model"]
    found = [p for p in paths if p.endswith("inner/linear")]
    above = {"model", "layers/0", "layers/0/inner", "layers/1", "layers/1/inner"}
    assert set(seen["found"]) == above | set(found)
    assert seen["count"] == f"{len(found)} of {len(paths)} modules"
    assert seen["overflow"] == 0
    assert seen["figures"] == ["38.9%", "46.2%"]
    # WCAG AA for text.
    assert seen["contrast"] >= 4.5
    assert (seen["ground"] < 0.1) == is_dark


def test_hostile_names_do_nothing_in_a_browser(hostile, tmp_path):
    page = tmp_path / "page.html"
    page.write_text(_html.page(hostile).replace("</body>", f"{PROBE}</body>"))
    dom, console = browser.start(page, tmp_path / "profile", "--dump-dom")
    assert console == []
    assert '"images":0' in dom


def test_the_screenshot_is_not_blank(document, tmp_path):
    page, image = tmp_path / "page.html", tmp_path / "page.png"
    page.write_text(_html.page(document))
    _, console = browser.start(
        page, tmp_path / "profile", f"--screenshot={image}", "--window-size=1200,900"
    )
    assert console == []
    size, pixels = png(image.read_bytes())
    assert size == (1200, 900)
    assert len(set(pixels)) > 100


def test_an_error_in_a_page_is_seen(tmp_path):
    page = tmp_path / "page.html"
    page.write_text("<!doctype html><title>x</title><script>absent()</script>")
    _, console = browser.start(page, tmp_path / "profile", "--dump-dom")
    assert len(console) == 1
    assert "absent is not defined" in console[0]


def png(content):
    """The size of a PNG, and its filtered bytes."""
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    position, chunks = 8, []
    while position < len(content):
        length, kind = struct.unpack(">I4s", content[position : position + 8])
        chunks.append((kind, content[position + 8 : position + 8 + length]))
        position += length + 12
    size = struct.unpack(">II", chunks[0][1][:8])
    return size, zlib.decompress(b"".join(data for kind, data in chunks if kind == b"IDAT"))
