"""`halfbyte report`: rows, proofs and formats as one HTML file that loads nothing."""

from .page import Summary, write_report

__all__ = ["Summary", "write_report"]
