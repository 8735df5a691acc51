"""Everything the controller does about tokenizers, put together."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from meshd.config.settings import Settings
from meshd.control import ProcessBoard, Topology
from meshd.controller.admin import AdminRoute
from meshd.controller.automatic_tokenizers import AutomaticTokenizers
from meshd.controller.tokenizer_routes import TokenizerRoutes
from meshd.controller.tokenizers import TokenizerKeeper, living_reports
from meshd.log import Log
from meshd.prepare.tokenizer_board import TokenizerBoard
from meshd.routing.upstream import Upstream


class TokenizerControl:
    """``upstreams``: the present set, whose labels bring tokenizers."""

    def __init__(
        self,
        tokenizers: TokenizerBoard,
        board: ProcessBoard,
        topology: Topology,
        settings: Settings,
        log: Log,
        upstreams: Callable[[], Sequence[Upstream]],
    ) -> None:
        self._settings = settings
        self._upstreams = upstreams
        self.keeper = TokenizerKeeper(tokenizers, lambda: living_reports(board, topology, tokenizers), log)
        self._automatic = AutomaticTokenizers(self.keeper, log, time.monotonic)

    def start(self) -> None:
        """Say what the leaders are to load: they wait for it."""
        self.keeper.start(self._settings)

    def poll(self) -> None:
        """Bring everything up to date; called some times a second."""
        self._automatic.follow(self._upstreams())
        self.keeper.poll()

    def routes(self) -> list[AdminRoute]:
        return TokenizerRoutes(self.keeper, self.keeper.poll).routes()

    def engines(self) -> dict[tuple[str, ...], float]:
        """Return the values of ``mesh_tokenizer_info``: 1 by name and engine of each entry that serves."""
        self.keeper.poll()
        engines = [(entry.name, self.keeper.engine_of(entry)) for entry in self.keeper.entries]
        return {(name, engine): 1.0 for name, engine in engines if engine}
