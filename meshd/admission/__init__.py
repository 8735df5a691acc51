"""Who may enter: tickets and their bounds."""
