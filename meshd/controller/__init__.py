"""The controller process: what must exist once on a node."""
