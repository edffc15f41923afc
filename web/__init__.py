"""What a request passes through: middleware, tokens, errors; and the settings."""
