"""Which upstream is best: the set of upstreams, load, policies, placement."""
