"""Subject: description of the model or training loop under test, and how it is found out."""
