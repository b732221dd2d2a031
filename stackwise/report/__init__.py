"""Reports in text, Markdown, JSON and HTML, from the same records."""

from stackwise.report.report import Report, report_files, training_record

__all__ = ["Report", "report_files", "training_record"]
