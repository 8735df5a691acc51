"""What the wire formats mean: endpoints, requests, routing views, error dialects. Pure."""
