"""Makes pages of HTML that load nothing, and read on a phone and on a dark screen."""

import html

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ margin: 1rem; font: 12px/1.4 Menlo, "DejaVu Sans Mono", Consolas, monospace; }}
pre {{ margin: 0; font: inherit; }}
.wide {{ overflow-x: auto; }}
{style}
</style>
</head>
<body>
{body}
</body>
</html>
"""


def page_of(title: str, contents: list[str], style: str = "") -> str:
    """A page with its contents below each other. What is too wide scrolls by itself.

    Args:
        title: plain text.
        contents: pieces of HTML.
        style: further rules of CSS.
    """
    body = "\n".join(f'<div class="wide">{each}</div>' for each in contents)
    return _PAGE.format(title=html.escape(title), style=style, body=body)
