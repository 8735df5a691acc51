"""Writes docs/settings.md: ``python -m meshd.config.document > docs/settings.md``."""

from __future__ import annotations

import sys
from typing import Final

from meshd.config.declaration import Setting
from meshd.config.printing import default_text, details_text, sections
from meshd.config.settings import SETTINGS
from meshd.config.unsupported import unsupported_flags

_INTRODUCTION: Final = """\
# Settings

Written by `python -m meshd.config.document`; change the declaration in `meshd/config/settings.py` instead.

A setting has one name in four places: the flag `--max-payload-size`, the variable `MESHD_MAX_PAYLOAD_SIZE`,
the file key `max_payload_size`, and messages. A flag wins over the variable, the variable over the file
(`--config PATH` or `MESHD_CONFIG`), the file over the default. `meshd --print-config` shows all of them with
their sources.

| kind | flag | variable | file |
|---|---|---|---|
| switch | `--x`, `--x=false`, `--no-x` | `1 true yes on` / `0 false no off` | `true` / `false` |
| number | decimal; `_` allowed | the same | number |
| list | `--x a b --x c` (repeats add up) | separated by spaces | array |
| table of strings | `--x k=v k=v` (repeats add up) | separated by spaces | table |

"Takes effect" tells what SIGHUP does with a change. *live*: it acts within 1 s. *new processes*: those that
read it are replaced, without a failed request: new ones start, which takes seconds (longer with large
tokenizers or on a busy machine), take over together, and the old ones end what they have. *restart*: nothing,
but a warning. The log names the changes. SIGHUP also opens the log anew and reads the files of section TLS.
"""
_EFFECTS: Final = {"live": "live", "processes": "new processes", "restart": "restart"}
_UNSUPPORTED: Final = """\
## Flags of other routers that meshd lacks

Each ends the start with one line and exit code 2.

| flags | reason |
|---|---|
"""


def document_text() -> str:
    """Return the whole page."""
    parts = [_INTRODUCTION]
    for section, settings in sections():
        rows = "".join(_row(each) for each in settings)
        parts.append(
            f"## {section}\n\n| setting | default | values | takes effect |\n|---|---|---|---|\n{rows}"
        )
    parts.append(f"## Aliases\n\n| alias | same as |\n|---|---|\n{_aliases()}")
    rows = "".join(f"| {_codes(patterns)} | {reason} |\n" for reason, patterns in unsupported_flags())
    return "\n".join(parts) + "\n" + _UNSUPPORTED + rows


def _row(setting: Setting) -> str:
    name = f"`{setting.flag}`" if setting.has_flag else f"`[[{setting.name}]]` (file only)"
    default = default_text(setting) or "–"
    details = details_text(setting) or str(setting.kind)
    return f"| {name}<br>{setting.help} | {default} | {details} | {_EFFECTS[setting.takes_effect]} |\n"


def _aliases() -> str:
    pairs = sorted((alias, each.flag) for each in SETTINGS for alias in each.aliases)
    return "".join(f"| `--{alias}` | `{flag}` |\n" for alias, flag in pairs)


def _codes(patterns: tuple[str, ...]) -> str:
    return " ".join(f"`--{pattern}`" for pattern in patterns)


if __name__ == "__main__":
    sys.stdout.write(document_text())
