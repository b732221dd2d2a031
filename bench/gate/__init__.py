"""What the regression gate is worth: its rates, and those of other tools, on commits of known effect."""
