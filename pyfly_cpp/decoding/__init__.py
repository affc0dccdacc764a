"""How to decode: `Decoding`, the one setting of Python, presets, the command line, the server and measuring."""

from __future__ import annotations

from pyfly_cpp.decoding.setting import (
    EXACT,
    OF_REQUEST,
    PLAIN,
    Decoding,
    parse_drafter,
    parse_settings,
    require_repeatable,
    short_names,
    written,
    written_drafters,
)

__all__ = [
    "EXACT",
    "OF_REQUEST",
    "PLAIN",
    "Decoding",
    "parse_drafter",
    "parse_settings",
    "require_repeatable",
    "short_names",
    "written",
    "written_drafters",
]
