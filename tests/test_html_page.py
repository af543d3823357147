"""Pages read on a phone and on a dark screen, and show the title as it is."""

from bridge._html_page import page_of


def test_contents_scroll_on_a_phone_and_are_dark_where_wanted():
    page = page_of("a <b> & c", ["<pre>1</pre>", "<table></table>"], "td { color: red; }")
    assert "<title>a &lt;b&gt; &amp; c</title>" in page
    assert page.count('<div class="wide">') == 2
    assert ".wide { overflow-x: auto; }" in page
    assert '<meta name="viewport" content="width=device-width' in page
    assert "color-scheme: light dark" in page
    assert "td { color: red; }" in page
