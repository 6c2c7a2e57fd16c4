"""Render plots, tables, Markdown and HTML. Measures nothing; the caller has the document."""
