"""What people look at: reports as HTML, `forebay top`."""
