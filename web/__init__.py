"""The HTTP side of the service: middleware, requests, errors, documents, settings."""
