"""Makes figures readable: plots, Markdown and HTML. Measures nothing; whoever calls it has the document."""
