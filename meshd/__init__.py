"""meshd: the request front end that stands before LLM inference servers."""

__version__ = "0.1.0"
