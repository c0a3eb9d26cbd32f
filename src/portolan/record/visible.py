"""Text from elsewhere, made safe to print: nothing in it can move, hide or reorder what is read."""

import unicodedata

_HIDDEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")


def is_plain(text: str) -> bool:
    """Whether a text has no control, format (bidi), private, unassigned or separator character."""
    return (text.isascii() and text.isprintable()) or not any(map(_is_hidden, text))


def visible(text: str) -> str:
    """The text with every such character written as its code point."""
    if is_plain(text):
        return text
    return "".join(f"\\u{ord(c):04x}" if _is_hidden(c) else c for c in text)


def _is_hidden(character: str) -> bool:
    return unicodedata.category(character) in _HIDDEN
