"""Source mutants: small mistakes in the source of third-party models, and an independent oracle."""
