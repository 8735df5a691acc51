"""One small pure file a policy."""
