"""Text without what a terminal obeys instead of showing: escape sequences, control characters, marks of direction."""

from __future__ import annotations

import re

LONGEST = 500
"""Maximum number of characters to show of another machine's text."""
_SEQUENCE = re.compile(r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]")
"""Colors and movements (ECMA-48, 5.4). Others have zero width, and could hide what follows them."""
_CONTROL = re.compile(
    r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]"
)


def strip_controls(text: str) -> str:
    """Return ``text`` without escape sequences, and with spaces for other control characters but the line feed."""
    return _CONTROL.sub(" ", _SEQUENCE.sub("", text)) if _CONTROL.search(text) else text


def to_printable(text: str) -> str:
    """Return ``text`` on one line, without controls, cut to :data:`LONGEST` characters."""
    clean = strip_controls(text[: 2 * LONGEST]).replace("\n", " ")
    return clean if len(clean) <= LONGEST else f"{clean[:LONGEST]}..."
