"""HTML from strings nobody trusts: everything goes through :func:`text` or :func:`attribute`."""

from __future__ import annotations

import html

_LINE_BREAKS = {"\n": "&#10;", "\r": "&#13;"}


def text(value: object) -> str:
    """Escape ``value`` for element content and attributes, on one line (line breaks become character references)."""
    escaped = html.escape(str(value), quote=True)
    for raw, reference in _LINE_BREAKS.items():
        escaped = escaped.replace(raw, reference)
    return escaped


def element(name: str, content: str = "", css: str = "", **attributes: object) -> str:
    """Return one element around markup made by these functions; ``data_x`` becomes ``data-x``."""
    given = {"class": css} if css else {}
    given |= {key.replace("_", "-"): value for key, value in attributes.items() if value is not None}
    written = "".join(f' {key}="{text(value)}"' for key, value in given.items())
    return f"<{name}{written}>{content}</{name}>"


def number(value: float | None, digits: int = 1, unit: str = "") -> str:
    """Return a number for people; a dash where there is none."""
    return "–" if value is None else f"{value:,.{digits}f}{unit}"
