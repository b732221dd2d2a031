"""Reports: every finding from the same records, for people and for programs."""

from stackwise.report.report import Report

__all__ = ["Report"]
