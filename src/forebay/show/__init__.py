"""What people look at: reports as HTML, comparisons, `forebay top`."""
