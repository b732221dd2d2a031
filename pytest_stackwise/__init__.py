"""The pytest face of stackwise."""
