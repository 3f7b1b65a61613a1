"""What MkDocs runs while it builds: absent pages stay out of the navigation, and sessions are coloured as such."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def on_config(config: Any) -> Any:
    config.nav = _existing(config.nav, Path(config.docs_dir))
    return config


def on_page_markdown(markdown: str, **_: Any) -> str:
    return markdown.replace("```python\n>>> ", "```pycon\n>>> ")


def _existing(entries: list[Any], folder: Path) -> list[Any]:
    kept: list[Any] = []
    for entry in entries:
        title, target = next(iter(entry.items())) if isinstance(entry, dict) else (None, entry)
        if isinstance(target, list):
            kept.append({title: _existing(target, folder)})
        elif (folder / target).exists():
            kept.append(entry)
    return kept
