"""Where the docstrings of this library differ from what mkdocstrings reads.

One example is a section of examples too, roles are plain code, arguments may share a description, and an example may stand without
a title.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|func|meth|mod|attr|data):`~?([^`]+)`")
_EXAMPLE = re.compile(r"^( *)Examples?:(?: (see the module\.))?\n", re.MULTILINE)
_SHARED = re.compile(r"^( +)(\w+), (\w+): (.+(?:\n\1 +.+)*)", re.MULTILINE)
_BARE = re.compile(r"^(>>> .*(?:\n.+)*)", re.MULTILINE)


class House(griffe.Extension):
    """Rewrites each docstring before it is parsed."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is not None:
            text = _ROLE.sub(r"`\1`", obj.docstring.value)
            text = _EXAMPLE.sub(lambda found: "" if found[2] else f"{found[1]}Examples:\n", text)
            text = _SHARED.sub(r"\1\2: \4\n\1\3: \4", text)
            obj.docstring.value = _BARE.sub(r"```pycon\n\1\n```", text)
