"""What a request meets on its way through the service, and what configures that."""
