"""Subject: description of the model or training loop under test, and its inference."""
