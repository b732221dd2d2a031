"""Guard adapters for the training loops of other libraries. Each file imports only its own library."""
