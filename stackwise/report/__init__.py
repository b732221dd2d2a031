"""Reports: every finding from the same records, for people and for programs."""

from stackwise.report.report import Report, report_files, training_record

__all__ = ["Report", "report_files", "training_record"]
