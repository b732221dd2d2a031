"""Did it get worse? Two revisions measured in turns, and a rule that knows how often it errs."""
