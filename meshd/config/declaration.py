"""What one setting is, and how a frozen dataclass of settings is read as a list of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from enum import StrEnum
from typing import Any, Final, Literal, get_args, get_origin, get_type_hints

#: ``live``: within 1 s of SIGHUP. ``processes``: SIGHUP replaces the processes that read it, old ones drain.
#: ``restart``: with a new start of meshd, which SIGHUP tells; listeners, shared memory, topology.
TakesEffect = Literal["live", "processes", "restart"]
#: Kinds of processes that read a setting; ``leader`` stands for prepare workers too.
Reader = Literal["io", "controller", "leader"]

# Whole numbers stay exact in JSON and in 64-bit words; times stay below 32 years, so that their
# nanoseconds fit a signed 64-bit word.
MAX_INTEGER: Final = 2**53
MAX_NUMBER: Final = 1e9


class Kind(StrEnum):
    """The syntax of a value; the kind follows from the type of the attribute."""

    BOOLEAN = "boolean"
    INTEGER = "whole number"
    NUMBER = "number"
    TEXT = "text"
    LIST = "list"
    NUMBERS = "list of numbers"
    PAIRS = "table of strings"  # written name=value where there are no tables
    TABLES = "array of tables"  # in the file alone

    @property
    def is_list(self) -> bool:
        """Whether a flag takes several words, and repeats add up."""
        return self in (Kind.LIST, Kind.NUMBERS, Kind.PAIRS)


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting. Its name serves in four places: attribute and file key, flag, variable.

    ``above`` is an exclusive lower bound. ``choice_aliases``: other spellings of a choice.
    ``choice_hints``: words of other routers, and the choice that does what they mean.
    ``aliases``: other names, written as flags without ``--``. ``default_text``: what help shows where
    the default is a stand-in such as 0. ``check``: returns the value, perhaps in normal form, or raises
    ``ValueError`` with words that follow "name: ". ``readers``: which processes a change replaces, if it
    takes effect with new processes.
    """

    name: str
    kind: Kind
    default: Any
    help: str
    section: str
    takes_effect: TakesEffect
    unit: str
    minimum: float | None
    maximum: float | None
    above: float | None
    choices: tuple[str, ...]
    choice_aliases: tuple[tuple[str, str], ...]
    choice_hints: tuple[tuple[str, str], ...]
    aliases: tuple[str, ...]
    metavar: str
    default_text: str
    is_secret: bool
    check: Callable[[Any], Any] | None
    readers: tuple[Reader, ...]

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return "MESHD_" + self.name.upper()

    @property
    def has_flag(self) -> bool:
        return self.kind is not Kind.TABLES


def setting(
    default: Any,
    *,
    section: str,
    help: str,
    takes_effect: TakesEffect,
    unit: str = "",
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    choices: tuple[str, ...] = (),
    choice_aliases: tuple[tuple[str, str], ...] = (),
    choice_hints: tuple[tuple[str, str], ...] = (),
    aliases: tuple[str, ...] = (),
    metavar: str = "",
    default_text: str = "",
    is_secret: bool = False,
    check: Callable[[Any], Any] | None = None,
    readers: tuple[Reader, ...] = ("io", "controller", "leader"),
) -> Any:
    """Declare one attribute of a settings dataclass; name and kind come from the attribute itself."""
    declared = {
        "help": help,
        "section": section,
        "takes_effect": takes_effect,
        "unit": unit,
        "minimum": minimum,
        "maximum": maximum,
        "above": above,
        "choices": choices,
        "choice_aliases": choice_aliases,
        "choice_hints": choice_hints,
        "aliases": aliases,
        "metavar": metavar,
        "default_text": default_text,
        "is_secret": is_secret,
        "check": check,
        "readers": readers,
    }
    return field(default=default, repr=not is_secret, metadata=declared)


def declared_settings(cls: type) -> tuple[Setting, ...]:
    """List the settings of a dataclass in order of declaration."""
    hints = get_type_hints(cls)
    return tuple(
        Setting(name=each.name, kind=_kind_of(hints[each.name]), default=each.default, **each.metadata)
        for each in fields(cls)
        if each.default is not MISSING
    )


def _kind_of(hint: Any) -> Kind:
    if get_origin(hint) is tuple:
        kinds = {str: Kind.LIST, float: Kind.NUMBERS, tuple[str, str]: Kind.PAIRS}
        return kinds.get(get_args(hint)[0], Kind.TABLES)
    return {bool: Kind.BOOLEAN, int: Kind.INTEGER, float: Kind.NUMBER, str: Kind.TEXT}[hint]
