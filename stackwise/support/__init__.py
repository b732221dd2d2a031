"""Support: code without a subject of its own that all packages use."""
