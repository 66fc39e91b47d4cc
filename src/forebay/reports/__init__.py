"""Reports as HTML files: summaries of what happened, charts of them, and their comparison."""
