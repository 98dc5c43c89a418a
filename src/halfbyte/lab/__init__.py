"""The laboratory: every claim as something that anyone can rerun."""
