"""A model of inference servers behind a router: policies compared without any server (routing_sim.py)."""
