"""The bundled deterministic upstream, for tests and demos."""
