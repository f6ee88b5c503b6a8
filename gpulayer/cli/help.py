"""Help pages as plain text that fits the terminal. Those of groups are made from tables; nothing is imported for them.

The page of one command is cyclopts'; only its looks are from here (its own need rich, or do not align). The looks are
named with every command, so what they need is imported when they print.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cyclopts.help import HelpPanel

WIDTH_MAX = 100
_LABEL_WIDTH_MAX = 28

# What stands for the value of an option, where "text" says too little.
_VALUES = {
    "DURATION": "--timeout --start-timeout --stop-grace --wait --for",
    "SIZE": "--gpu-memory --memory",
    "N": "--gpus --cpus --replicas --replica --max-restarts --retry-max-attempts --priority --tail --run --api-port "
    "--peer-port --uses",
    "FILE": "--file --env-file --config --token-file",
    "DIR": "--workdir --data-dir",
    "NAME": "--name --vendor --stop-signal",
    "ADDRESS": "--bind --advertise",
    "HOST[:PORT]": "--join",
    "PATTERN": "--gpu-model",
    "URL": "--url",
    "TOKEN": "--token",
}


def width() -> int:
    import shutil

    return max(40, min(WIDTH_MAX, shutil.get_terminal_size().columns))


def group_page(usage: str, text: str, panels: Mapping[str, Mapping[str, str]]) -> str:
    """Usage, what it is for, and columns of names and lines under headings."""
    parts = [f"Usage: {usage}", paragraphs(text)]
    parts += [columns(title, rows.items()) for title, rows in panels.items()]
    return "\n\n".join(parts)


def paragraphs(text: str) -> str:
    import textwrap

    return "\n\n".join(
        textwrap.fill(" ".join(block.split()), width(), break_on_hyphens=False) for block in text.split("\n\n")
    )


def columns(title: str, rows: Iterable[tuple[str, str]]) -> str:
    """Labels left, words right of them; a label too long for its column has a line of its own."""
    import textwrap

    listed = list(rows)
    label_width = min(_LABEL_WIDTH_MAX, max(len(label) for label, _ in listed))
    lines = [f"{title}:"]
    for label, words in listed:
        wrapped = textwrap.wrap(" ".join(words.split()), width() - label_width - 4, break_on_hyphens=False) or [""]
        if len(label) > label_width:
            lines.append(f"  {label}")
            label = ""
        lines.append(f"  {label:{label_width}}  {wrapped[0]}".rstrip())
        lines += [" " * (label_width + 4) + line for line in wrapped[1:]]
    return "\n".join(lines)


class Pages:
    """cyclopts' HelpFormatter, as plain columns."""

    def __call__(self, console: Any, options: Any, panel: HelpPanel) -> None:
        if panel.entries:
            rows = [(_label(entry), _words(entry)) for entry in panel.entries]
            print(columns(_plain(panel.title), rows) + "\n")

    def render_usage(self, console: Any, options: Any, usage: Any) -> None:
        text = _plain(usage).strip()
        # "[ARGS...]" is the command, which is what people look for here; or the jobs.
        words = "[--] CMD ARG…" if " submit " in text else "JOB…"
        text = text.removeprefix("Usage:").strip().replace("[ARGS...]", words)
        # The one argument that may be left out.
        print(f"Usage: {text.replace('[ARGS]', '[SHELL]')}\n")

    def render_description(self, console: Any, options: Any, description: Any) -> None:
        text = _plain(description)
        if text:
            print(paragraphs(text) + "\n")


def _label(entry: Any) -> str:
    shown: Sequence[str] = entry.display_labels_with_metavar
    # Options people repeat are shown once, as one value each.
    label = ", ".join(shown).replace("...", "")
    metavar = (entry.metavar or "").replace("...", "")
    value = next((value for value, names in _VALUES.items() if set(names.split()) & set(entry.positive_names)), None)
    if metavar not in ("STR", "INT") or not label.endswith(metavar):
        return label
    # --label is K=V of a node, and what a token is for.
    otherwise = "K=V" if _plain(entry.description).startswith("K=V") else "TEXT"
    return label.removesuffix(metavar) + (value or otherwise)


def _words(entry: Any) -> str:
    words = _plain(entry.description)
    return f"{words} ({', '.join(entry.choices)})" if entry.choices else words


def _plain(renderable: Any) -> str:
    if renderable is None:
        return ""
    if isinstance(renderable, str):
        return renderable
    for name in ("plain", "primary_renderable"):
        inner = getattr(renderable, name, None)
        if inner is not None:
            return inner if isinstance(inner, str) else _plain(inner)
    return str(renderable)
