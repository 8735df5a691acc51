from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cuts:
    """Why texts may not be cut at safe cuts, empty where the proof holds.

    ``head``: for the ids of a text's opening. ``pieces``: for putting the ids of a text together.
    """

    head: str = "it was not proved"
    pieces: str = "it was not proved"
