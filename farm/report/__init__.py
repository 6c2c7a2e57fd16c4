"""Render plots, tables, Markdown and HTML. Measures nothing; whoever calls it has the document."""
